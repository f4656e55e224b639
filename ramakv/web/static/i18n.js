// Words and numbers, in the language that was chosen: by the browser first, then by the switch.

const EN = {
  "skip": "Skip to content", "cancel": "Cancel", "overview": "Overview",
  "hold": "Hold", "hold.title": "Hold the page still", "resume": "Go on",
  "search.label": "Session id or chunk hash",
  "token.title": "Token needed", "token.label": "Token", "token.open": "Open",
  "token.text": "This daemon asks for its auth_token. It is kept in this tab only.",
  "token.wrong": "That is not the token.",
  "phase.running": "running", "phase.degraded": "degraded", "phase.starting": "starting",
  "phase.stopping": "stopping", "phase.lost": "no connection", "phase.connecting": "connecting",
  "phase.held": "held",
  "news.lost": "The connection to the daemon was lost. Trying again.",
  "news.back": "Connected again.",
  "news.trouble": "LMCache is in trouble", "news.fine": "LMCache works again.",
  "up": "up {0}", "age": "as of {0}", "ago": "{0} ago", "now": "now",
  "sessions": "Sessions", "sessions.in_turn": "in a turn", "sessions.paused": "paused",
  "sessions.suspended": "suspended", "sessions.closed": "closed",
  "sessions.paused.long": "paused between two turns",
  "sessions.waiting": "{0} requests wait or are under way",
  "sessions.none": "No session yet. An agent's first turn_end creates one.",
  "events": "Events", "per_second": "/s", "events.none": "No event yet.",
  "latency": "Latency", "latency.note": "p99, of events",
  "hot": "Belongs in the hot tier", "hot.unit": "chunks", "hot.saved": "sharing saves {0}",
  "hot.found": "{0} were hot when turns began",
  "hot.evicting": "{0} more wait to be evicted",
  "owed": "Evictions owed", "owed.none": "nothing is owed", "owed.oldest": "the oldest for {0}",
  "chart.events": "Events per second",
  "chart.latency": "Latency of events",
  "chart.said": "{0} now {1}; highest {2}.",
  "chart.start": "5 min ago", "chart.failed": "failed",
  "latest": "Latest sessions", "largest": "Who holds the most",
  "col.session": "Session", "col.state": "State", "col.chunks": "Chunks", "col.turns": "Turns",
  "col.forks": "Forks", "col.last": "Last event", "col.share": "Share", "col.bar": "As a bar",
  "shared": "Most shared chunks", "shared.none": "No chunk is held twice by the sessions awake.",
  "shared.first": "First chunk", "shared.count": "Chunks", "shared.refs": "Held by",
  "shared.who": "Sessions", "shared.more": "{0} more", "shared.times": "{0}×",
  "shared.note": "Chunks that the same sessions hold are one row. Found among sessions that are awake; held-by counts all, forks and sleepers too.",
  "by_type": "Events by type", "col.type": "Type", "col.rate": "Per second", "col.ok": "OK",
  "col.failed": "Refused or failed", "col.p50": "p50", "col.p99": "p99",
  "fate": "What became of evictions", "fate.name": "Outcome", "fate.unit": "Chunks since the start",
  "fate.done": "evicted", "fate.withdrawn": "withdrawn: referenced again",
  "fate.forgiven": "forgiven: lost in a restart of LMCache", "fate.waiting": "waiting",
  "fate.in_flight": "in flight", "fate.dead_letters": "dead letters: LMCache refuses them",
  "fate.retried": "{0} times one was tried again",
  "lmcache": "LMCache", "lmcache.fine": "It answers.", "lmcache.noop": "No LMCache: the backend is noop.",
  "lmcache.calls": "Calls", "lmcache.tokens": "Calls left", "lmcache.tokens.of": "{0} of {1}",
  "lmcache.unpaced": "not paced", "lmcache.breaker": "Breaker", "lmcache.held": "Held by prefetches",
  "lmcache.held.unknown": "not told", "breaker.closed": "closed", "breaker.open": "open",
  "breaker.half_open": "half open: one call tries",
  "call.prefetch": "prefetch", "call.evict": "evict",
  "prefetches": "Prefetches", "pre.accepted": "sent", "pre.failed": "failed",
  "pre.late": "too late", "pre.skipped": "skipped", "pre.waiting": "waiting",
  "store": "Store", "store.commits": "Commits", "store.group": "Commits in a transaction",
  "store.waiting": "Waiting", "store.failed": "Transactions that failed",
  "col.time": "Time", "col.level": "Level", "col.what": "What",
  "problems": "Recent failures", "problems.none": "None since the start.",
  "level.warning": "Warning", "level.error": "Error", "level.critical": "Critical",
  "act.close": "Close", "act.close.title": "Close this session?",
  "act.close.text": "Session {0} ends for good. Chunks that nobody else holds are evicted.",
  "act.suspend": "Suspend", "act.suspend.title": "Suspend this session?",
  "act.suspend.text": "Session {0} lets go of its chunks, which leave the hot tier where nobody else holds them. Its next turn_start brings them back.",
  "act.retry": "Retry dead letters", "act.retry.title": "Try dead letters again?",
  "act.retry.text": "{0} chunks that LMCache refused to evict are queued again.",
  "act.pause": "Pause prefetching", "act.pause.title": "Pause prefetching?",
  "act.pause.text": "Turns start without their chunks being brought up, until prefetching goes on or the daemon is restarted.",
  "act.unpause": "Resume prefetching", "act.unpause.title": "Resume prefetching?",
  "act.unpause.text": "Chunks are brought up again before each turn.",
  "act.done": "Done.", "paused.note": "An operator has paused prefetching.",
  "session.none": "There is no session {0}. It was closed, or never was.",
  "session.state": "State", "session.turns": "Turns", "session.last": "Last event",
  "session.asleep": "asleep: its map is on disk", "session.awake": "awake",
  "session.pinned": "pinned", "session.waiting": "Requests", "session.in_turn": "In a turn for",
  "map": "Chunk map", "map.first": "the first {0} of {1} chunks", "map.count": "{0} chunks",
  "map.none": "The map is empty.", "map.read": "Point at the strip, or use the table below.",
  "map.at": "#{0}  {1}  {2}, held by {3}",
  "place.h": "hot", "place.d": "on disk", "place.o": "in another tier", "place.m": "missing",
  "place.?": "not known", "map.shared": "shared", "map.table": "All chunks as a table",
  "map.table.first": "The first {0} chunks as a table",
  "map.unknown": "Where chunks lie is not known: {0}",
  "col.number": "#", "col.hash": "Hash", "col.place": "Place", "col.held": "Held by",
  "turns": "Turns over time", "turns.none": "No turn ended since the daemon started.",
  "turns.said": "Chunks after each of the last {0} turns, from {1} to {2}.",
  "turns.held": "chunks held after the turn", "turns.gone": "queued for eviction by it",
  "turns.table": "Turns as a table", "col.ended": "Ended", "col.took": "Took", "col.evicted": "Evicted",
  "forks": "Forks", "forks.none": "No open fork.", "col.fork": "Fork", "col.opened": "Opened",
  "found": "Search: {0}", "found.none": "Neither a session nor a chunk that is referenced has this.",
  "found.sessions": "Sessions", "found.more": "and more; be more precise",
  "found.chunk": "Chunk {0}", "found.refs": "Held by {0}, forks and sleeping sessions included.",
  "found.holders": "Awake sessions that hold it", "found.asleep": "No session that is awake holds it.",
  "error": "It did not work: {0}", "loading": "Loading…",
  "unit.s": "s", "unit.min": "min", "unit.h": "h", "unit.d": "d",
};

const ZH = {
  "skip": "跳到正文", "cancel": "取消", "overview": "总览",
  "hold": "定格", "hold.title": "让页面停住不动", "resume": "继续",
  "search.label": "会话 ID 或块哈希",
  "token.title": "需要令牌", "token.label": "令牌", "token.open": "打开",
  "token.text": "这个 daemon 要求提供 auth_token。令牌只保存在本标签页中。",
  "token.wrong": "令牌不对。",
  "phase.running": "运行中", "phase.degraded": "降级", "phase.starting": "启动中",
  "phase.stopping": "停止中", "phase.lost": "连接断开", "phase.connecting": "连接中",
  "phase.held": "已定格",
  "news.lost": "与 daemon 的连接断开，正在重试。", "news.back": "已重新连接。",
  "news.trouble": "LMCache 出现问题", "news.fine": "LMCache 已恢复。",
  "up": "已运行 {0}", "age": "截至 {0}", "ago": "{0}前", "now": "现在",
  "sessions": "会话", "sessions.in_turn": "轮内", "sessions.paused": "暂停",
  "sessions.suspended": "挂起", "sessions.closed": "已关闭",
  "sessions.paused.long": "两轮之间暂停",
  "sessions.waiting": "{0} 个请求在等待或处理中",
  "sessions.none": "还没有会话。agent 的第一个 turn_end 会创建会话。",
  "events": "事件", "per_second": "/秒", "events.none": "还没有事件。",
  "latency": "延迟", "latency.note": "事件的 p99",
  "hot": "应在热层的块", "hot.unit": "块", "hot.saved": "共享节省 {0}",
  "hot.found": "轮开始时 {0} 在热层",
  "hot.evicting": "另有 {0} 个等待驱逐",
  "owed": "尚欠的驱逐", "owed.none": "没有欠账", "owed.oldest": "最久的已等 {0}",
  "chart.events": "每秒事件数",
  "chart.latency": "事件延迟",
  "chart.said": "{0} 现在为 {1}，最高 {2}。",
  "chart.start": "5 分钟前", "chart.failed": "失败",
  "latest": "最近的会话", "largest": "谁占得最多",
  "col.session": "会话", "col.state": "状态", "col.chunks": "块", "col.turns": "轮次",
  "col.forks": "分叉", "col.last": "最近事件", "col.share": "占比", "col.bar": "条形图",
  "shared": "共享最多的块", "shared.none": "醒着的会话之间没有共享的块。",
  "shared.first": "首块", "shared.count": "块数", "shared.refs": "持有者",
  "shared.who": "会话", "shared.more": "另有 {0} 个", "shared.times": "{0}×",
  "shared.note": "由相同会话持有的块合为一行。只在醒着的会话中查找；持有者数包括全部会话和分叉，睡眠的也算。",
  "by_type": "各类事件", "col.type": "类型", "col.rate": "每秒", "col.ok": "成功",
  "col.failed": "拒绝或失败", "col.p50": "p50", "col.p99": "p99",
  "fate": "驱逐的去向", "fate.name": "结果", "fate.unit": "启动以来的块数",
  "fate.done": "已驱逐", "fate.withdrawn": "撤回：又被引用",
  "fate.forgiven": "免除：LMCache 重启时已丢失", "fate.waiting": "等待中",
  "fate.in_flight": "进行中", "fate.dead_letters": "死信：LMCache 拒绝驱逐",
  "fate.retried": "重试过 {0} 次",
  "lmcache": "LMCache", "lmcache.fine": "应答正常。", "lmcache.noop": "没有 LMCache：后端为 noop。",
  "lmcache.calls": "调用", "lmcache.tokens": "剩余调用额度", "lmcache.tokens.of": "{0} / {1}",
  "lmcache.unpaced": "不限速", "lmcache.breaker": "熔断器", "lmcache.held": "预取占住的块",
  "lmcache.held.unknown": "未告知", "breaker.closed": "闭合", "breaker.open": "断开",
  "breaker.half_open": "半开：放行一次试探",
  "call.prefetch": "预取", "call.evict": "驱逐",
  "prefetches": "预取", "pre.accepted": "已发", "pre.failed": "失败",
  "pre.late": "太迟", "pre.skipped": "跳过", "pre.waiting": "等待",
  "store": "存储", "store.commits": "提交", "store.group": "每个事务的提交数",
  "store.waiting": "等待中", "store.failed": "失败的事务",
  "col.time": "时间", "col.level": "级别", "col.what": "内容",
  "problems": "最近的故障", "problems.none": "启动以来没有。",
  "level.warning": "警告", "level.error": "错误", "level.critical": "严重",
  "act.close": "关闭", "act.close.title": "关闭这个会话？",
  "act.close.text": "会话 {0} 就此结束。没有别人持有的块会被驱逐。",
  "act.suspend": "挂起", "act.suspend.title": "挂起这个会话？",
  "act.suspend.text": "会话 {0} 放开它的块；没有别人持有的块离开热层，下一个 turn_start 会把它们带回来。",
  "act.retry": "重试死信", "act.retry.title": "重试死信？",
  "act.retry.text": "LMCache 曾拒绝驱逐的 {0} 个块重新排队。",
  "act.pause": "暂停预取", "act.pause.title": "暂停预取？",
  "act.pause.text": "在恢复预取或重启 daemon 之前，每轮开始时不再调入它的块。",
  "act.unpause": "恢复预取", "act.unpause.title": "恢复预取？",
  "act.unpause.text": "每轮开始前重新调入它的块。",
  "act.done": "已完成。", "paused.note": "操作员已暂停预取。",
  "session.none": "没有会话 {0}：已关闭，或从未存在。",
  "session.state": "状态", "session.turns": "轮次", "session.last": "最近事件",
  "session.asleep": "睡眠：块映射在磁盘上", "session.awake": "醒着",
  "session.pinned": "已固定", "session.waiting": "请求", "session.in_turn": "本轮已进行",
  "map": "块映射", "map.first": "共 {1} 块，显示前 {0} 块", "map.count": "{0} 块",
  "map.none": "块映射为空。", "map.read": "把指针移到色带上，或使用下面的表格。",
  "map.at": "#{0}  {1}  {2}，持有者 {3}",
  "place.h": "热层", "place.d": "磁盘", "place.o": "其他层", "place.m": "缺失",
  "place.?": "未知", "map.shared": "共享", "map.table": "以表格显示全部块",
  "map.table.first": "以表格显示前 {0} 块",
  "map.unknown": "不知道块在哪里：{0}",
  "col.number": "#", "col.hash": "哈希", "col.place": "位置", "col.held": "持有者",
  "turns": "各轮变化", "turns.none": "daemon 启动以来没有结束的轮次。",
  "turns.said": "最近 {0} 轮结束后的块数，从 {1} 到 {2}。",
  "turns.held": "该轮结束后持有的块", "turns.gone": "由该轮排队驱逐的块",
  "turns.table": "以表格显示各轮", "col.ended": "结束于", "col.took": "用时", "col.evicted": "驱逐",
  "forks": "分叉", "forks.none": "没有打开的分叉。", "col.fork": "分叉", "col.opened": "打开于",
  "found": "搜索：{0}", "found.none": "没有这样的会话，也没有这样的被引用的块。",
  "found.sessions": "会话", "found.more": "还有更多，请输入得更精确",
  "found.chunk": "块 {0}", "found.refs": "持有者 {0} 个，包括分叉和睡眠的会话。",
  "found.holders": "持有它的醒着的会话", "found.asleep": "醒着的会话都不持有它。",
  "error": "没有成功：{0}", "loading": "载入中…",
  "unit.s": "秒", "unit.min": "分", "unit.h": "小时", "unit.d": "天",
};

const TEXTS = { en: EN, zh: ZH };
const KEY = "ramakv.language";

let language = remembered() ?? (document.documentElement.lang === "zh" ? "zh" : "en");

function remembered() {
  try {
    const kept = localStorage.getItem(KEY);
    return kept in TEXTS ? kept : null;
  } catch {
    return null;  // storage can be switched off
  }
}

export const languageNow = () => language;

export function setLanguage(next) {
  language = next;
  try {
    localStorage.setItem(KEY, next);
  } catch { /* it lasts as long as the page, then */ }
}

export function t(key, ...values) {
  const text = TEXTS[language][key] ?? EN[key] ?? key;
  return text.replace(/\{(\d)\}/g, (_, n) => values[n]);
}

/** Put the chosen language into what the shell has. */
export function translateShell() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const node of document.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  for (const node of document.querySelectorAll("[data-t-placeholder]")) {
    node.placeholder = t(node.dataset.tPlaceholder);
  }
}

const numbers = {};

function format(value, digits) {
  const key = `${language}${digits}`;
  numbers[key] ??= new Intl.NumberFormat(language === "zh" ? "zh-CN" : "en", {
    minimumFractionDigits: digits, maximumFractionDigits: digits,
  });
  return numbers[key].format(value);
}

export const count = (value) => format(value, 0);
export const rate = (value) => format(value, value < 10 && value % 1 ? 1 : 0);
export const percent = (share) => `${format(100 * share, share > 0 && share < 0.1 ? 1 : 0)} %`;

export function millis(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = 1000 * seconds;
  return ms >= 1000 ? `${format(seconds, 1)} s` : `${format(ms, ms < 10 && ms % 1 ? 1 : 0)} ms`;
}

export function span(seconds) {
  if (seconds < 60) return `${format(seconds, seconds < 10 ? 1 : 0)} ${t("unit.s")}`;
  if (seconds < 3600) return `${format(seconds / 60, 0)} ${t("unit.min")}`;
  if (seconds < 86400) return `${format(seconds / 3600, 1)} ${t("unit.h")}`;
  return `${format(seconds / 86400, 1)} ${t("unit.d")}`;
}

export const ago = (seconds) => (seconds < 1 ? t("now") : t("ago", span(seconds)));

export function clock(ms) {
  return new Date(ms).toLocaleTimeString(language === "zh" ? "zh-CN" : "en-GB");
}
