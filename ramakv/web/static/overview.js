// The overview: everything at a glance, filled anew by each snapshot.

import { pausePrefetching, retryDeadLetters } from "./actions.js";
import { LineChart, dividedBar } from "./charts.js";
import { Facts, Table, chunkLink, h, printable, say, section, sessionLink } from "./dom.js";
import { ago, clock, count, millis, percent, rate, span, t } from "./i18n.js";

export const stateName = (state) => h("span.state", { "data-state": state }, t(`sessions.${state}`));

export function sessionColumns() {
  return [
    { head: t("col.session"), kind: "grow", cell: (row) => sessionLink(row.id) },
    { head: t("col.state"), cell: (row) => stateName(row.state), mark: (row) => row.state },
    { head: t("col.chunks"), kind: "number", cell: (row) => count(row.chunks) },
    { head: t("col.turns"), kind: "number wide", cell: (row) => count(row.turns) },
    { head: t("col.forks"), kind: "number wide", cell: (row) => count(row.forks) },
    { head: t("col.last"), kind: "number", cell: (row) => ago(row.idle_seconds) },
  ];
}

function rateColumns(head, name) {
  return [
    { head, kind: "grow", cell: (row) => name(row.name) },
    { head: t("col.rate"), kind: "number", cell: (row) => rate(row.per_second) },
    { head: t("col.p50"), kind: "number", cell: (row) => millis(row.p50) },
    { head: t("col.p99"), kind: "number", cell: (row) => millis(row.p99) },
    { head: t("col.ok"), kind: "number wide", cell: (row) => count(row.ok) },
    { head: t("col.failed"), kind: "number wide", cell: (row) => count(row.failed) },
  ];
}

const asBar = () => h("span.unseen", {}, t("col.bar"));

class Figure {
  constructor(title) {
    this.value = h("p.value");
    this.note = h("p.note");
    this.extra = h("div.extra");
    this.node = h("div.figure", {}, h("h2", {}, title), this.value, this.extra, this.note);
  }

  show(value, unit, note) {
    const shown = `${value}${unit}`;
    if (this.shown !== shown) {
      this.shown = shown;
      this.value.replaceChildren(value, h("span.unit", {}, unit));
    }
    say(this.note, note);
  }
}

export class Overview {
  constructor(points) {
    this.points = points;
    this.sessions = new Figure(t("sessions"));
    this.events = new Figure(t("events"));
    this.latency = new Figure(t("latency"));
    this.hot = new Figure(t("hot"));
    this.owed = new Figure(t("owed"));
    this.throughput = new LineChart(
      t("chart.events"), [{ name: t("events"), kind: "main" }, { name: t("chart.failed"), kind: "bad" }], rate);
    this.delays = new LineChart(
      t("chart.latency"), [{ name: "p50", kind: "second" }, { name: "p99", kind: "main" }], (ms) => millis(ms));
    this.latest = new Table(t("latest"), sessionColumns(), { empty: t("sessions.none"), key: (row) => row.id });
    this.largest = new Table(t("largest"), this.#largestColumns(), { empty: t("sessions.none"), key: (row) => row.id });
    this.shared = new Table(t("shared"), sharedColumns(), { empty: t("shared.none"), key: (row) => row.first });
    this.byType = new Table(
      t("by_type"), rateColumns(t("col.type"), (name) => name || "–"), { empty: t("events.none"), key: (row) => row.name });
    this.fate = new Table(t("fate"), fateColumns(), { empty: "", key: (row) => row.name });
    this.retried = h("p.quiet");
    this.retry = h("button", { type: "button", onclick: () => retryDeadLetters(count(this.deadLetters)) }, t("act.retry"));
    this.lmcache = new LMCachePanel();
    this.store = new Facts({
      commits: t("store.commits"), group: t("store.group"), waiting: t("store.waiting"), failed: t("store.failed"),
    });
    this.problems = new Table(t("problems"), problemColumns(), { empty: t("problems.none"), key: (row) => row.key });
    this.node = this.#layout();
  }

  #layout() {
    return h(
      "div.overview", {},
      h("h1.unseen", {}, t("overview")),
      h("div.figures", {}, ...[this.sessions, this.events, this.latency, this.hot, this.owed].map((figure) => figure.node)),
      h("div.pair", {}, this.throughput.node, this.delays.node),
      h("div.pair", {}, section(t("latest"), this.latest.node), section(t("largest"), this.largest.node)),
      section(t("shared"), this.shared.node, h("p.quiet", {}, t("shared.note"))),
      h("div.pair", {},
        section(t("fate"), this.fate.node, this.retried, this.retry),
        section(t("lmcache"), this.lmcache.node)),
      h("div.pair", {}, section(t("by_type"), this.byType.node), section(t("store"), this.store.node)),
      section(t("problems"), this.problems.node),
    );
  }

  #largestColumns() {
    const [session, state, chunks] = sessionColumns();
    const share = (row) => (this.referenced ? row.chunks / this.referenced : 0);
    return [
      session, state, chunks,
      { head: t("col.share"), kind: "number", cell: (row) => percent(Math.min(1, share(row))) },
      { head: asBar(), kind: "gauge wide", mark: (row) => (row.chunks / this.most).toFixed(3),
        cell: (row) => dividedBar([{ kind: "hot", value: row.chunks }, { kind: "rest", value: this.most - row.chunks }], percent(share(row))) },
    ];
  }

  show(now) {
    this.referenced = now.chunks.referenced;
    this.most = Math.max(1, ...now.largest.map((row) => row.chunks));
    this.deadLetters = now.evictions.dead_letters;
    this.#figures(now);
    const failed = this.points.map((p) => p[4]);
    this.throughput.draw([this.points.map((p) => p[1]), failed.some((n) => n) ? failed : []]);
    this.delays.draw([this.points.map((p) => p[2]), this.points.map((p) => p[3])]);
    this.latest.show(now.recent);
    this.largest.show(now.largest);
    this.shared.show(now.shared);
    this.byType.show(now.by_type.map((row) => ({ ...row })));
    this.fate.show(fates(now.evictions));
    say(this.retried, now.evictions.retried ? t("fate.retried", count(now.evictions.retried)) : "");
    this.retry.hidden = !this.deadLetters;
    this.lmcache.show(now.lmcache);
    const { store } = now;
    this.store.set("commits", `${rate(store.commits_per_second)} ${t("per_second")}`);
    this.store.set("group", store.transactions_per_second ? rate(store.commits_per_second / store.transactions_per_second) : "–");
    this.store.set("waiting", count(store.waiting));
    this.store.set("failed", count(store.failed));
    this.problems.show(now.problems.map(([at, level, what, facts]) => ({ at, level, what, facts, key: `${at} ${what} ${JSON.stringify(facts)}` })));
  }

  #figures({ sessions, events, chunks, evictions }) {
    const states = ["in_turn", "paused", "suspended"];
    const whole = states.reduce((sum, state) => sum + sessions[state], 0);
    const parts = states.map((state) => `${count(sessions[state])} ${t(`sessions.${state}`)}`);
    this.sessions.show(count(whole), "", parts.join(" · "));
    this.sessions.extra.replaceChildren(dividedBar(states.map((kind) => ({ kind, value: sessions[kind] })), parts.join(", ")));
    this.events.show(rate(events.per_second), ` ${t("per_second")}`, sessions.waiting ? t("sessions.waiting", count(sessions.waiting)) : "");
    this.latency.show(millis(events.p99), "", `${t("latency.note")} · p50 ${millis(events.p50)}`);
    const saved = chunks.references > chunks.referenced ? 1 - chunks.referenced / chunks.references : 0;
    const more = chunks.evicting ? t("hot.evicting", count(chunks.evicting)) : "";
    const found = chunks.hot_share === null ? "" : t("hot.found", percent(chunks.hot_share));
    this.hot.show(count(chunks.referenced), ` ${t("hot.unit")}`, [t("hot.saved", percent(saved)), found, more].filter(Boolean).join(" · "));
    const owed = evictions.waiting + evictions.in_flight;
    this.owed.show(count(owed), "", owed ? t("owed.oldest", span(evictions.oldest_seconds)) : t("owed.none"));
  }
}

function sharedColumns() {
  return [
    { head: t("shared.refs"), kind: "number", cell: (row) => t("shared.times", count(row.references)) },
    { head: t("shared.count"), kind: "number", cell: (row) => count(row.chunks) },
    { head: t("shared.first"), kind: "hash", cell: (row) => chunkLink(row.first), mark: (row) => row.first },
    {
      head: t("shared.who"), kind: "grow wide", mark: (row) => JSON.stringify([row.sessions, row.more]),
      cell: (row) => {
        const links = row.sessions.flatMap((id, n) => (n ? [", ", sessionLink(id)] : [sessionLink(id)]));
        if (row.more) links.push(h("span.quiet", {}, ` ${t("shared.more", count(row.more))}`));
        return h("span.many", {}, ...links);
      },
    },
  ];
}

const FATES = ["done", "withdrawn", "forgiven", "waiting", "in_flight", "dead_letters"];

function fates(evictions) {
  const whole = FATES.reduce((sum, name) => sum + evictions[name], 0);
  return FATES.map((name) => ({ name, value: evictions[name], share: whole ? evictions[name] / whole : 0 }));
}

function fateColumns() {
  return [
    { head: t("fate.name"), kind: "words", cell: (row) => t(`fate.${row.name}`) },
    { head: t("fate.unit"), kind: "number", cell: (row) => count(row.value) },
    { head: asBar(), kind: "gauge", mark: (row) => row.share.toFixed(3),
      cell: (row) => dividedBar([{ kind: row.name === "dead_letters" ? "bad" : "hot", value: row.share }, { kind: "rest", value: 1 - row.share }], percent(row.share)) },
  ];
}

function problemColumns() {
  return [
    { head: t("col.time"), kind: "time", cell: (row) => clock(row.at) },
    { head: t("col.level"), mark: (row) => row.level,
      cell: (row) => h("span.level", { "data-level": row.level }, t(`level.${row.level}`)) },
    { head: t("col.what"), kind: "grow", mark: (row) => row.key,
      cell: (row) => h("span.problem", {}, h("span", {}, printable(row.what)),
        h("span.quiet", {}, Object.entries(row.facts).map(([name, value]) => `${name}: ${printable(value)}`).join(" · "))) },
  ];
}

class LMCachePanel {
  constructor() {
    this.state = h("p.lmcache");
    this.facts = new Facts({
      breaker: t("lmcache.breaker"), tokens: t("lmcache.tokens"), held: t("lmcache.held"), prefetches: t("prefetches"),
    });
    this.calls = new Table(
      t("lmcache.calls"), rateColumns(t("lmcache.calls"), (name) => t(`call.${name}`)), { empty: "", key: (row) => row.name });
    this.pause = h("button", { type: "button", onclick: () => pausePrefetching(!this.isPaused) });
    this.node = h("div", {}, this.state, this.facts.node, this.calls.node, this.pause);
  }

  show(now) {
    this.isPaused = now.paused;
    const trouble = now.paused ? t("paused.note") : now.trouble;
    const fine = now.kind === "noop" ? t("lmcache.noop") : t("lmcache.fine");
    this.state.dataset.state = trouble ? "trouble" : "fine";
    say(this.state, `${trouble || fine}${now.url ? ` ${now.url}` : ""}`);
    this.facts.set("breaker", t(`breaker.${now.breaker}`));
    this.facts.set("tokens", now.tokens === null ? t("lmcache.unpaced") : t("lmcache.tokens.of", count(Math.max(0, now.tokens)), count(now.burst)));
    this.facts.set("held", now.held === null ? t("lmcache.held.unknown") : t("lmcache.tokens.of", count(now.held), now.held_max ? count(now.held_max) : "∞"));
    this.facts.set("prefetches", Object.entries(now.prefetches).map(([name, value]) => `${count(value)} ${t(`pre.${name}`)}`).join(" · "));
    this.calls.show(now.calls);
    say(this.pause, t(now.paused ? "act.unpause" : "act.pause"));
  }
}
