// Charts as inline SVG: lines over the last minutes, turns as bars, and a map as a strip.

import { h, set } from "./dom.js";
import { count, t } from "./i18n.js";

const WIDTH = 600;
const HEIGHT = 120;
const POINTS = 300;

/** A round number that is not below the value. */
function ceiling(value) {
  if (value <= 0) return 1;
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((n) => n * step).find((n) => n >= value);
}

/** Lines over the last five minutes, one point a second; null is a gap. */
export class LineChart {
  constructor(title, lines, show) {
    this.title = title;
    this.lines = lines;
    this.show = show;
    this.paths = lines.map((line) => h(`path.line.${line.kind}`, { "vector-effect": "non-scaling-stroke" }));
    this.svg = h(
      "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      h("line.grid", { x1: 0, x2: WIDTH, y1: 0.5, y2: 0.5, "vector-effect": "non-scaling-stroke" }),
      h("line.grid", { x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2, "vector-effect": "non-scaling-stroke" }),
      h("line.axis", { x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5, "vector-effect": "non-scaling-stroke" }),
      ...this.paths,
    );
    this.top = h("span.top");
    this.middle = h("span.middle");
    this.legend = h("span.legend", {}, ...lines.map((line) => h(`span.key.${line.kind}`, {}, line.name)));
    this.node = h(
      "figure.chart", {},
      h("figcaption", {}, h("span", {}, title), this.legend),
      h("div.plot", {}, this.svg, this.top, this.middle),
      h("div.times", { "aria-hidden": "true" }, h("span", {}, t("chart.start")), h("span", {}, t("now"))),
    );
  }

  /** columns: one list of values for each line, the newest last. */
  draw(columns) {
    const known = columns.flat().filter((value) => value !== null);
    const highest = Math.max(0, ...known);
    const top = ceiling(highest);
    columns.forEach((values, n) => set(this.paths[n], "d", path(values, top)));
    this.top.textContent = this.show(top);
    this.middle.textContent = this.show(top / 2);
    const said = columns.map((values, n) => {
      const last = values.at(-1);
      const name = this.lines.length > 1 ? this.lines[n].name : "";
      const most = Math.max(0, ...values.filter((value) => value !== null));
      return t("chart.said", name, last === null || last === undefined ? "–" : this.show(last), this.show(most)).trim();
    });
    set(this.svg, "aria-label", `${this.title}: ${said.join(" ")}`);
  }
}

function path(values, top) {
  let drawn = "";
  let pen = "M";
  values.forEach((value, n) => {
    if (value === null) {
      pen = "M";
      return;
    }
    const x = WIDTH * (1 - (values.length - 1 - n) / (POINTS - 1));
    const y = HEIGHT - 1 - (HEIGHT - 4) * (value / top);
    drawn += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  });
  return drawn;
}

/** A bar that is divided into parts: [{ kind, value }], told by its label. */
export function dividedBar(parts, label) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  const svg = h("svg.divided", { viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": label });
  let x = 0;
  for (const part of parts) {
    const width = whole ? (100 * part.value) / whole : 0;
    if (width) svg.append(h(`rect.${part.kind}`, { x: x.toFixed(2), y: 0, width: Math.max(0, width - 0.4).toFixed(2), height: 8 }));
    x += width;
  }
  return svg;
}

/** Chunks after each turn, as bars; what a turn queued for eviction hangs below the line. */
export function turnBars(turns) {
  const top = ceiling(Math.max(1, ...turns.map((turn) => turn[2])));
  const slots = 32;
  const svg = h("svg.turns", {
    viewBox: `0 0 ${slots} 100`, preserveAspectRatio: "none", role: "img",
    "aria-label": t("turns.said", count(turns.length), count(turns[0][2]), count(turns.at(-1)[2])),
  });
  const bar = (kind, n, y, height) => h(`rect.${kind}`, {
    x: n + 0.12, y: y.toFixed(1), width: 0.76, height: Math.max(0.5, height).toFixed(1), "vector-effect": "non-scaling-stroke",
  });
  turns.forEach(([, , chunks, evicted], n) => {
    const up = (80 * chunks) / top;
    svg.append(bar("held", n, 80 - up, up));
    if (evicted) svg.append(bar("gone", n, 83, Math.min(16, (80 * evicted) / top)));
  });
  svg.append(h("line.axis", { x1: 0, x2: slots, y1: 81, y2: 81, "vector-effect": "non-scaling-stroke" }));
  return h(
    "figure.chart.few", {},
    h("figcaption", {}, h("span.legend", {}, h("span.key.held", {}, t("turns.held")), h("span.key.gone", {}, t("turns.gone")))),
    h("div.plot", {}, svg, h("span.top", {}, count(top))),
  );
}

const CELL = 10;
const ROW = 26;
const KINDS = ["h", "d", "o", "m", "?"];
const NAMES = { h: "hot", d: "disk", o: "other", m: "missing", "?": "unknown" };

/**
 * A map as a strip that wraps: one cell a chunk, in prefix order. How a cell is filled says where
 * the chunk lies, a line above it that others hold it too. One path a kind, however many cells.
 */
export class Strip {
  constructor(onPoint) {
    this.svg = h("svg.strip", { role: "img" });
    this.node = h("div.strip-box", {}, this.svg);
    this.svg.addEventListener("pointermove", (event) => onPoint(this.#at(event)));
    this.svg.addEventListener("pointerleave", () => onPoint(null));
    this.size = 0;
  }

  draw(places, references, label) {
    this.size = places.length;
    this.perRow = Math.max(8, Math.floor((this.node.clientWidth || 800) / CELL));
    const rows = Math.ceil(this.size / this.perRow);
    set(this.svg, "viewBox", `0 0 ${this.perRow * CELL} ${rows * ROW}`);
    set(this.svg, "width", String(this.perRow * CELL));
    set(this.svg, "height", String(rows * ROW));
    set(this.svg, "aria-label", label);
    const drawn = Object.fromEntries(KINDS.map((kind) => [kind, ""]));
    let shared = "";
    for (let n = 0; n < this.size; n += 1) {
      const x = (n % this.perRow) * CELL;
      const y = Math.floor(n / this.perRow) * ROW;
      drawn[places[n]] += `M${x + 0.5} ${y + 7.5}h8v13h-8z`;
      if (references[n] > 1) shared += `M${x} ${y + 3.5}h9`;
    }
    this.svg.replaceChildren(
      patterns(),
      ...KINDS.filter((kind) => drawn[kind]).map((kind) => h(`path.cell.${NAMES[kind]}`, { d: drawn[kind] })),
      h("path.shared", { d: shared }),
    );
  }

  #at(event) {
    const box = this.svg.getBoundingClientRect();
    const scale = (this.perRow * CELL) / box.width;
    const column = Math.floor(((event.clientX - box.left) * scale) / CELL);
    const row = Math.floor(((event.clientY - box.top) * scale) / ROW);
    const n = row * this.perRow + column;
    return column < this.perRow && n >= 0 && n < this.size ? n : null;
  }
}

function patterns() {
  return h(
    "defs", {},
    h("pattern", { id: "hatch", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      h("rect.ground", { width: 4, height: 4 }), h("rect.ink", { width: 1.6, height: 4 })),
    h("pattern", { id: "dots", width: 4, height: 4, patternUnits: "userSpaceOnUse" },
      h("rect.ground", { width: 4, height: 4 }), h("rect.ink", { x: 1, y: 1, width: 1.4, height: 1.4 })),
  );
}

/** What a cell looks like, for the legend. */
export function legendCell(kind) {
  if (kind === "shared") {
    return h("svg.sample", { viewBox: "0 0 10 22", width: 10, height: 22, "aria-hidden": "true" }, h("path.shared", { d: "M0 3.5h9" }), h("path.cell.plain", { d: "M.5 7.5h8v13h-8z" }));
  }
  return h("svg.sample", { viewBox: "0 0 10 22", width: 10, height: 22, "aria-hidden": "true" }, h(`path.cell.${NAMES[kind]}`, { d: "M.5 7.5h8v13h-8z" }));
}
