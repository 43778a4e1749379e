// Chats through the script of the server's page, on the few parts of a DOM that it uses:
// node page_dom.js URL. Writes JSON: what the page shows at each step, and what it keeps.
const vm = require("vm");
class Text {
  nodeName = "#text";
  constructor(text) { this.textContent = text; }
  toString() { return this.textContent.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); }
}
class Element {
  value = ""; hidden = false; attributes = {}; childNodes = []; handlers = {}; options = [];
  constructor(tag) { this.tag = tag; this.nodeName = tag.toUpperCase(); this.textContent = ""; }
  get textContent() { return this.childNodes.map((node) => node.textContent).join(""); }
  set textContent(text) { this.replaceChildren(...(text === "" ? [] : [text])); }
  get lastChild() { return this.childNodes.at(-1); }
  get classList() { return { add: (name) => { this.className += ` ${name}`; } }; }
  get previousElementSibling() { return this.parent.childNodes[this.parent.childNodes.indexOf(this) - 1]; }
  append(...nodes) {
    for (const node of nodes) this.childNodes.push(typeof node === "string" ? new Text(node) : Object.assign(node, { parent: this }));
  }
  appendChild(node) { this.append(node); return node; }
  replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
  remove() { this.parent.childNodes = this.parent.childNodes.filter((node) => node !== this); }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(kind, handler) { this.handlers[kind] = handler; }
  fire(kind, event = {}) { return this.handlers[kind]({ preventDefault() {}, ...event }); }
  find(name, all = []) {
    if (this.className?.split(" ").includes(name) || this.tag === name) all.push(this);
    for (const node of this.childNodes) node.find?.(name, all);
    return all;
  }
  checkValidity() { return true; }
  focus() {}
  toString() {
    const given = { ...(this.className && { class: this.className }), ...(this.href && { href: this.href }), ...this.attributes };
    const text = Object.entries(given).map(([name, value]) => ` ${name}="${value}"`).join("");
    return `<${this.tag}${text}>${this.childNodes.join("")}</${this.tag}>`;
  }
}
const url = process.argv[2], kept = {}, timers = [];
const copied = [];
async function open() {
  const html = await (await fetch(url)).text();
  const elements = Object.fromEntries([...html.matchAll(/<(\w+)[^>]* id="(\w+)"/g)].map(([, tag, id]) => [id, new Element(tag)]));
  const document = {
    ...new Element("document"), addEventListener() {}, getElementById: (id) => elements[id],
    createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag),
  };
  const storage = (values) => ({ getItem: (key) => values[key] ?? null, setItem: (key, value) => { values[key] = value; } });
  const globals = {
    document, performance, AbortController, TextDecoderStream, Promise, setTimeout, addEventListener() {},
    setInterval: (...given) => timers.push(setInterval(...given)), matchMedia: () => ({ matches: true }),
    sessionStorage: storage({}), localStorage: storage(kept),
    navigator: { clipboard: { writeText: async (text) => { copied.push(text); } } },
    fetch: (path, options) => fetch(new URL(path, url), options),
  };
  vm.runInNewContext(/<script>([^]*?)<\/script>/.exec(html)[1], globals);
  await until(() => elements.model.childNodes.length);
  return elements;
}
async function until(condition) {
  for (let tries = 0; !condition(); tries++) {
    if (tries > 1000) throw new Error(`in vain: ${condition}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}
const answered = (page, count) => until(() => page.log.find("again").length === count && page.log.find("markdown").length >= count);
(async () => {
  const first = await open();
  first.input.value = "Hello";
  first.composer.fire("submit");
  await answered(first, 1);
  await until(() => first.log.find("pre").length);
  const asked = first.log.toString();
  await first.log.find("small")[0].fire("click");
  const article = first.log.find("article")[0];
  await article.lastChild.lastChild.fire("click");
  await until(() => first.log.find("article")[0] !== article);
  await answered(first, 1);
  const second = await open();
  await answered(second, 1);
  second.marks.checked = true;
  second.input.value = "More";
  second.composer.fire("submit");
  await until(() => second.log.find("again").length === 2);
  const marked = second.log.find("marked")[0].toString();
  process.stdout.write(JSON.stringify({ asked, again: first.log.childNodes.length, copied, marked, kept: JSON.parse(kept["lmx-chat"]) }));
  timers.forEach(clearInterval);
  process.exit();
})();
