// Making and updating elements. Text only ever goes in as text: ids and hashes are made by clients.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "rect", "line", "text", "defs", "pattern", "title"]);

/** h("p.note", { id: "x" }, "text", child, …) */
export function h(spec, attributes = {}, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set text only where it differs, so that nothing is laid out anew in vain. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function set(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

const UNSEEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;

/** What a client called something, with what would hide or turn text made visible. */
export function printable(text) {
  return text.replace(UNSEEN, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

export const sessionUrl = (id) => `#/session/${encodeURIComponent(id)}`;
export const searchUrl = (text) => `#/search/${encodeURIComponent(text)}`;

export function sessionLink(id) {
  return h("a.id", { href: sessionUrl(id), title: printable(id) }, printable(id));
}

export function chunkLink(hash) {
  return h("a.id", { href: searchUrl(hash), title: printable(hash) }, printable(hash));
}

/** A section with a heading, known to assistive technology by it. */
export function section(title, ...children) {
  const id = `h-${Math.random().toString(36).slice(2)}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), ...children);
}

/**
 * A table whose rows are kept by key. While somebody points at it or has focus in it, its rows
 * keep their places, and only their cells change: nobody clicks on what was not there before.
 *
 * A column is { head, cell(row) → string | Node, kind: "number" | "wide" | … }.
 */
export class Table {
  constructor(label, columns, { empty = "", key }) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = h("tbody");
    this.empty = h("p.quiet", {}, empty);
    const heads = columns.map((column) => h(spec("th", column), { scope: "col" }, column.head));
    this.table = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, ...heads)), this.body);
    this.node = h("div.table", {}, this.table, this.empty);
  }

  get isBusy() {
    return this.table.contains(document.activeElement) || this.body.matches(":hover");
  }

  show(items) {
    const wanted = new Map(items.map((item) => [this.key(item), item]));
    for (const [key, row] of this.rows) if (wanted.has(key)) this.#fill(row, wanted.get(key));
    if (!this.isBusy || !this.rows.size) this.#arrange(wanted);
    this.table.hidden = !this.rows.size;
    this.empty.hidden = this.rows.size > 0;
  }

  #arrange(wanted) {
    for (const [key, row] of this.rows) {
      if (!wanted.has(key)) {
        row.node.remove();
        this.rows.delete(key);
      }
    }
    let before = null;
    for (const [key, item] of [...wanted].reverse()) {
      let row = this.rows.get(key);
      if (!row) {
        row = this.#make(item);
        this.rows.set(key, row);
      }
      if (row.node.nextSibling !== before || !row.node.isConnected) {
        this.body.insertBefore(row.node, before);
      }
      before = row.node;
    }
  }

  #make(item) {
    const cells = this.columns.map((column) => h(spec("td", column)));
    const row = { node: h("tr", {}, ...cells), cells, shown: [] };
    this.#fill(row, item);
    return row;
  }

  #fill(row, item) {
    this.columns.forEach((column, n) => {
      const content = column.cell(item);
      const mark = typeof content === "string" ? content : (column.mark?.(item) ?? this.key(item));
      if (row.shown[n] === mark) return;
      row.shown[n] = mark;
      row.cells[n].replaceChildren(content);
    });
  }
}

const spec = (tag, column) => (column.kind ? `${tag}.${column.kind.split(" ").join(".")}` : tag);

/** A list of terms and values whose values can be set. */
export class Facts {
  constructor(names) {
    this.values = {};
    this.node = h("dl.facts");
    for (const [key, name] of Object.entries(names)) {
      this.values[key] = h("dd");
      this.node.append(h("div", {}, h("dt", {}, name), this.values[key]));
    }
  }

  set(key, text) {
    say(this.values[key], text);
  }
}
