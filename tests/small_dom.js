// Runs the script of a page on the few parts of a DOM that it uses: node small_dom.js PAGE
const fs = require("fs"), vm = require("vm");
const page = fs.readFileSync(process.argv[2], "utf-8");
const [data, script] = [...page.matchAll(/<script[^>]*>([^]*?)<\/script>/g)].map((match) => match[1]);
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("\u00a0", "&nbsp;");
class Element {
  constructor(tag) { Object.assign(this, { tag, attributes: "", children: [] }); }
  setAttribute(name, value) { this.attributes += ` ${name}="${escaped(`${value}`).replaceAll('"', "&quot;")}"`; }
  append(...children) { this.children.push(...children); }
  toString() {
    const inner = this.children.map((child) => (child instanceof Element ? child : escaped(child)));
    return `<${this.tag}${this.attributes}>${inner.join("")}` + (this.tag === "wbr" ? "" : `</${this.tag}>`);
  }
}
const body = new Element("body");
const getElementById = () => ({ textContent: data });
vm.runInNewContext(script, { document: { body, getElementById, createElementNS: (_, tag) => new Element(tag) } });
process.stdout.write(page.replace("</body>", () => `${body.children.join("")}</body>`));
