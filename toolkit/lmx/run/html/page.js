// Draws the blocks of blocks.py. All text becomes text nodes: none of it is read as HTML.
function make(tag, attributes, ...children) {
  const isSvg = ["svg", "g", "title", "path", "circle", "text"].includes(tag);
  const namespace = isSvg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const node = document.createElementNS(namespace, tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  node.append(...children);
  return node;
}
function draw(block) {
  const { title, text, rows, lines, folded } = block;
  if (folded) {
    const inner = rows ? table(block) : make("pre", {}, text);
    return [make("details", {}, make("summary", {}, title), inner)];
  }
  if (rows || lines) return [rows ? table(block) : chart(block)];
  return [...(title ? [make("h3", {}, title)] : []), ...(text ? [make("pre", {}, text)] : [])];
}
function table({ title, columns, rows, kind }) {
  // Names of runs and keys have no spaces: they may break after an underscore.
  const breakable = (name) => name.split(/(?<=_)/).flatMap((part) => [part, make("wbr", {})]);
  const head = (scope) => (name) => make("th", { scope }, ...breakable(name));
  const cell = (value) => {
    const { text, ...attributes } = value.text === undefined ? { text: value } : value;
    return make("td", attributes, text.replace("± ", "±\u00a0"));
  };
  const body = rows.map(([name, ...cells]) => make("tr", {}, head("row")(name), ...cells.map(cell)));
  const parts = [make("caption", {}, make("span", {}, title)),
    make("thead", {}, make("tr", {}, ...columns.map(head("col")))), make("tbody", {}, ...body)];
  return make("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": title },
    make("table", { class: kind }, ...parts));
}
function chart({ title, unit, lines, table }) {
  const points = lines.flatMap(([, line]) => line).filter(([, value]) => value !== null);
  const values = points.map(([, value]) => value), low = Math.min(...values);
  const zero = low >= 0 && low < Math.max(...values) / 2 ? [0] : [];
  const x = scale([0, ...points.map(([at]) => at)], 62, 340), y = scale([...zero, ...values], 172, 10);
  const rule = (d) => make("path", { class: "rule", d });
  const stroke = (i, d) => make("path", { class: `line line-${(i % 6) + 1}`, d });
  const words = (x, y, anchor, text) => make("text", { x, y, "text-anchor": anchor }, text);
  const curve = ([name, line], i) => {
    const d = line.map(([at, value], k) =>
      value === null ? "" : `${k && line[k - 1][1] !== null ? "L" : "M"}${x.place(at)} ${y.place(value)}`);
    const marks = line.length > 40 ? [] : line.filter(([, value]) => value !== null);
    return make("g", {}, make("title", {}, name), stroke(i, d.join("")), ...marks.map(([at, value]) =>
      make("circle", { class: `line-${(i % 6) + 1}`, cx: x.place(at), cy: y.place(value), r: 2.5 })));
  };
  const sample = (i) => make("svg", { viewBox: "0 0 28 8", "aria-hidden": true }, stroke(i, "M0 4H28"));
  const names = lines.length > 1 ? lines.map(([name], i) => make("li", {}, sample(i), ` ${name}`)) : [];
  return make("figure", {}, make("figcaption", {}, make("b", {}, title), `, ${unit}`),
    make("ul", { class: "legend" }, ...names),
    make("svg", { viewBox: "0 0 360 210", role: "img", tabindex: 0, "aria-label": `${table.title}, by ${table.columns[0]}` },
      ...y.ticks.flatMap(([at, text]) => [rule(`M62 ${at}H340`), words(57, at + 4, "end", text)]),
      ...x.ticks.flatMap(([at, text]) => [rule(`M${at} 172v4`), words(at, 189, "middle", text)]),
      words(340, 206, "end", table.columns[0]), ...lines.map(curve)),
    ...draw(table));
}
function scale(values, start, end) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const place = (value) => Math.round(10 * (start + ((value - low) / (high - low)) * (end - start))) / 10;
  // About five ticks, at 1, 2 or 5 times a power of ten.
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((each) => each >= rough * 0.999);
  const isSmall = Math.max(-low, high) < 0.01;
  const label = (value) => value && isSmall ? Number(value.toPrecision(4)).toExponential()
    : value.toLocaleString("en", { maximumSignificantDigits: 6 });
  const ticks = [];
  for (let n = Math.ceil(low / step); n <= high / step; n++) ticks.push([place(n * step), label(n * step + 0)]);
  return { place, ticks };
}
const { title, header, sections } = JSON.parse(document.getElementById("data").textContent);
const links = sections.map(({ id, title }) => make("li", {}, make("a", { href: `#${id}` }, title)));
const section = ({ id, title, blocks }) =>
  make("section", { id, "aria-label": title }, make("h2", {}, title), ...blocks.flatMap(draw));
const nav = make("nav", { "aria-label": "Sections" }, make("ul", {}, ...links));
document.body.append(make("header", {}, make("h1", {}, title), ...header.flatMap(draw), nav),
  make("main", { id: "main" }, ...sections.map(section)));
