// The page: which view is shown, and what the stream says.

import { follow } from "./api.js";
import { say, searchUrl, sessionUrl } from "./dom.js";
import { clock, languageNow, setLanguage, span, t, translateShell } from "./i18n.js";
import { Overview } from "./overview.js";
import { Search } from "./search.js";
import { Session } from "./session.js";

const POINTS_MAX = 300;
const $ = (id) => document.getElementById(id);

const points = [];
let latest = null;
let phase = "connecting";
let connection = "connecting";
let isHeld = false;
let view = null;

function route() {
  const [, name = "", rest = ""] = /^#\/(\w*)\/?(.*)$/.exec(location.hash) ?? [];
  let argument = "";
  try {
    argument = decodeURIComponent(rest);
  } catch { /* somebody wrote the address by hand */ }
  if (name === "session" && argument) return new Session(argument);
  if (name === "search" && argument) return new Search(argument);
  return new Overview(points);
}

/** Show what the address says. After a click the new heading has the focus. */
function open({ hasMoved }) {
  view?.stop?.();
  view = route();
  view.isHeld = () => isHeld;
  $("main").replaceChildren(view.node);
  view.start?.();
  if (latest) view.show?.(latest);
  if (hasMoved) {
    window.scrollTo(0, 0);
    ($("main").querySelector("h1[tabindex]") ?? $("main")).focus({ preventScroll: true });
  }
}

function showState() {
  const trouble = latest?.lmcache.trouble ?? "";
  let state = connection === "open" ? phase : connection;
  if (state === "running" && trouble) state = "degraded";
  $("dot").dataset.state = state;
  say($("phase"), isHeld ? `${t(`phase.${state}`)} · ${t("phase.held")}` : t(`phase.${state}`));
  say($("trouble"), connection === "lost" ? t("news.lost") : trouble);
  $("trouble").hidden = !$("trouble").textContent;
}

function tell(text) {
  say($("news"), text);
}

function onEvent(kind, data) {
  const wasLost = connection === "lost";
  connection = "open";
  if (wasLost) tell(t("news.back"));
  if (kind === "hello") {
    points.splice(0, points.length, ...data.points);
  } else if (kind === "phase") {
    ({ phase } = data);
  } else if (kind === "snapshot") {
    take(data);
  }
  showState();
}

function take(snapshot) {
  ({ phase } = snapshot);
  if (points.at(-1)?.[0] !== snapshot.point[0]) points.push(snapshot.point);
  if (points.length > POINTS_MAX) points.splice(0, points.length - POINTS_MAX);
  const before = Boolean(latest?.lmcache.trouble);
  const after = Boolean(snapshot.lmcache.trouble);
  if (latest && before !== after) tell(after ? `${t("news.trouble")}: ${snapshot.lmcache.trouble}` : t("news.fine"));
  if (isHeld) return;
  latest = snapshot;
  view.show?.(snapshot);
  say($("version"), `ramakv ${snapshot.version}`);
  say($("uptime"), t("up", span(snapshot.up_seconds)));
  say($("age"), t("age", clock(snapshot.at_ms)));
}

function onLost() {
  if (connection === "open") tell(t("news.lost"));
  connection = "lost";
  showState();
}

function translate() {
  translateShell();
  const other = languageNow() === "zh" ? "en" : "zh";
  $("language").lang = other;
  say($("language"), other === "zh" ? "中文" : "English");
  say($("hold"), t(isHeld ? "resume" : "hold"));
  $("hold").title = t("hold.title");
  showState();
}

$("language").addEventListener("click", () => {
  setLanguage(languageNow() === "zh" ? "en" : "zh");
  translate();
  open({ hasMoved: false });
});

$("hold").addEventListener("click", () => {
  isHeld = !isHeld;
  $("hold").setAttribute("aria-pressed", String(isHeld));
  translate();
});

$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const query = $("query").value.trim();
  if (!query) return;
  const isKnown = latest && [...latest.recent, ...latest.largest].some((row) => row.id === query);
  location.hash = isKnown ? sessionUrl(query) : searchUrl(query);
});

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
  if (event.key === "/" && !isTyping && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    $("query").focus();
  }
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which view is shown
  $("main").focus();
});

window.addEventListener("hashchange", () => open({ hasMoved: true }));
translate();
open({ hasMoved: false });
follow({ onEvent, onLost });
