// A session's own page: what it holds and where that lies, its turns, its forks.

import { closeSession, suspendSession } from "./actions.js";
import { read } from "./api.js";
import { Strip, legendCell, turnBars } from "./charts.js";
import { Facts, Table, chunkLink, h, printable, say, section } from "./dom.js";
import { ago, clock, count, span, t } from "./i18n.js";
import { stateName } from "./overview.js";

const EVERY_MS = 3000;
const TABLE_ROWS_MAX = 500;

export class Session {
  constructor(id) {
    this.id = id;
    this.shown = printable(id);
    this.body = h("div", {}, h("p.quiet", {}, t("loading")));
    this.wrong = h("p.wrong", { role: "alert", hidden: true });
    this.suspend = h("button", { type: "button", onclick: () => this.#act(suspendSession) }, t("act.suspend"));
    this.close = h("button", { type: "button", onclick: () => this.#act(closeSession) }, t("act.close"));
    this.buttons = h("div.buttons", { hidden: true }, this.suspend, this.close);
    this.state = h("span");
    this.node = h(
      "article.session", {},
      h("nav", { "aria-label": t("overview") }, h("a", { href: "#/" }, `← ${t("overview")}`)),
      h("div.title", {}, h("h1.id", { tabindex: "-1" }, this.shown), this.state, this.buttons),
      this.wrong, this.body,
    );
  }

  start() {
    this.#tick();
  }

  stop() {
    clearTimeout(this.timer);
    this.isStopped = true;
  }

  async #act(action) {
    if (await action(this.id, this.shown)) await this.#load();
  }

  async #tick() {
    if (!document.hidden && !this.isHeld?.()) await this.#load();
    if (!this.isStopped) this.timer = setTimeout(() => this.#tick(), EVERY_MS);
  }

  async #load() {
    try {
      this.#show(await read("/api/session", { id: this.id }));
      this.wrong.hidden = true;
    } catch (error) {
      if (error.status === 404) {
        this.buttons.hidden = true;
        this.state.replaceChildren();
        this.parts = null;
        this.body.replaceChildren(h("p", {}, t("session.none", this.shown)));
      } else {
        say(this.wrong, t("error", error.message));
        this.wrong.hidden = false;
      }
    }
  }

  #show(view) {
    const { session } = view;
    this.parts ??= this.#make();
    const { parts } = this;
    this.buttons.hidden = session.state === "closed";
    this.suspend.hidden = session.state === "suspended";
    if (this.stateShown !== session.state) {
      this.stateShown = session.state;
      this.state.replaceChildren(stateName(session.state));
    }
    const kept = session.awake ? t("session.awake") : t("session.asleep");
    parts.facts.set("chunks", count(session.chunks));
    parts.facts.set("turns", count(session.turns) + (view.seq === null ? "" : ` (seq ${view.seq})`));
    parts.facts.set("last", ago(session.idle_seconds));
    parts.facts.set("state", [session.state === "closed" ? "" : kept, view.pinned ? t("session.pinned") : "",
      session.turn_seconds === null ? "" : `${t("session.in_turn")} ${span(session.turn_seconds)}`].filter(Boolean).join(" · "));
    this.#showMap(view);
    this.#showTurns(view.turns);
    parts.forks.show(view.forks);
  }

  #make() {
    const strip = new Strip((n) => this.#point(n));
    const parts = {
      facts: new Facts({
        chunks: t("col.chunks"), turns: t("session.turns"), last: t("session.last"), state: t("session.state"),
      }),
      strip,
      legend: h("ul.legend"),
      read: h("p.quiet.read"),
      trouble: h("p.note", { hidden: true }),
      chunks: new Table(t("map"), chunkColumns(), { empty: t("map.none"), key: (row) => row.n }),
      chunksTitle: h("summary"),
      turns: h("div"),
      turnTable: new Table(t("turns"), turnColumns(), { empty: t("turns.none"), key: (row) => row[0] }),
      forks: new Table(t("forks"), forkColumns(), { empty: t("forks.none"), key: (row) => row.id }),
    };
    this.body.replaceChildren(
      parts.facts.node,
      section(t("map"), parts.legend, strip.node, parts.read, parts.trouble,
        h("details", {}, parts.chunksTitle, parts.chunks.node)),
      section(t("turns"), parts.turns, h("details", {}, h("summary", {}, t("turns.table")), parts.turnTable.node)),
      section(t("forks"), parts.forks.node),
    );
    say(parts.read, t("map.read"));
    return parts;
  }

  #showMap(view) {
    const { parts } = this;
    const { hashes, references, places, session } = view;
    this.view = view;
    const kinds = ["h", "d", "o", "m", "?"].map((kind) => [kind, [...places].filter((place) => place === kind).length]);
    const counted = kinds.filter(([, n]) => n).map(([kind, n]) => [kind, `${count(n)} ${t(`place.${kind}`)}`]);
    const shared = references.filter((n) => n > 1).length;
    counted.push(["shared", `${count(shared)} ${t("map.shared")}`]);
    const whole = hashes.length < session.chunks
      ? t("map.first", count(hashes.length), count(session.chunks))
      : t("map.count", count(hashes.length));
    const label = [whole, ...counted.map(([, text]) => text)].join(", ");
    parts.strip.node.hidden = !hashes.length;
    parts.read.hidden = !hashes.length;
    const drawn = JSON.stringify([places, references, parts.strip.node.clientWidth]);
    if (this.drawn !== drawn) {
      this.drawn = drawn;
      parts.strip.draw(places, references, label);
      parts.legend.replaceChildren(
        h("li.whole", {}, whole), ...counted.map(([kind, text]) => h("li", {}, legendCell(kind), text)));
    }
    parts.trouble.hidden = !view.places_trouble;
    say(parts.trouble, view.places_trouble ? t("map.unknown", view.places_trouble) : "");
    const rows = hashes.slice(0, TABLE_ROWS_MAX).map((hash, n) => ({ n, hash, place: places[n], held: references[n] }));
    say(parts.chunksTitle, rows.length < session.chunks ? t("map.table.first", count(rows.length)) : t("map.table"));
    parts.chunks.show(rows);
  }

  #point(n) {
    const { hashes, places, references } = this.view;
    say(this.parts.read, n === null ? t("map.read")
      : t("map.at", count(n + 1), printable(hashes[n]), t(`place.${places[n]}`), count(references[n])));
  }

  #showTurns(turns) {
    const drawn = JSON.stringify(turns);
    if (this.turnsDrawn !== drawn) {
      this.turnsDrawn = drawn;
      this.parts.turns.replaceChildren(turns.length ? turnBars(turns) : h("p.quiet", {}, t("turns.none")));
    }
    this.parts.turnTable.show([...turns].reverse());
  }
}

function chunkColumns() {
  return [
    { head: t("col.number"), kind: "number", cell: (row) => count(row.n + 1) },
    { head: t("col.hash"), kind: "grow", cell: (row) => chunkLink(row.hash), mark: (row) => row.hash },
    { head: t("col.place"), cell: (row) => t(`place.${row.place}`) },
    { head: t("col.held"), kind: "number", cell: (row) => count(row.held) },
  ];
}

function turnColumns() {
  return [
    { head: t("col.ended"), kind: "time grow", cell: (row) => clock(row[0]) },
    { head: t("col.took"), kind: "number", cell: (row) => (row[1] === null ? "–" : span(row[1])) },
    { head: t("col.chunks"), kind: "number", cell: (row) => count(row[2]) },
    { head: t("col.evicted"), kind: "number", cell: (row) => count(row[3]) },
  ];
}

function forkColumns() {
  return [
    { head: t("col.fork"), kind: "number", cell: (row) => String(row.id) },
    { head: t("col.opened"), kind: "time grow", cell: (row) => clock(row.opened_ms) },
    { head: t("col.chunks"), kind: "number", cell: (row) => count(row.chunks) },
  ];
}
