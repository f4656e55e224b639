// What a search finds: sessions by a part of their id, a chunk by its hash.

import { read } from "./api.js";
import { Table, h, printable, section } from "./dom.js";
import { count, t } from "./i18n.js";
import { sessionColumns } from "./overview.js";

export class Search {
  constructor(query) {
    this.query = query;
    this.body = h("div", {}, h("p.quiet", {}, t("loading")));
    this.node = h(
      "article", {},
      h("nav", { "aria-label": t("overview") }, h("a", { href: "#/" }, `← ${t("overview")}`)),
      h("h1", { tabindex: "-1" }, t("found", printable(query))), this.body,
    );
  }

  async start() {
    try {
      this.#show(await read("/api/search", { q: this.query }));
    } catch (error) {
      this.body.replaceChildren(h("p.wrong", { role: "alert" }, t("error", error.message)));
    }
  }

  stop() {}

  #show(found) {
    const parts = [];
    if (found.sessions.length) {
      parts.push(section(t("found.sessions"), rows(t("found.sessions"), found.sessions, ""), found.more ? h("p.quiet", {}, t("found.more")) : null));
    }
    if (found.references) {
      parts.push(section(
        t("found.chunk", printable(found.chunk)), h("p", {}, t("found.refs", count(found.references))),
        rows(t("found.holders"), found.holders, t("found.asleep")),
      ));
    }
    if (!parts.length) parts.push(h("p", {}, t("found.none")));
    this.body.replaceChildren(...parts);
  }
}

function rows(label, sessions, empty) {
  const table = new Table(label, sessionColumns(), { empty, key: (row) => row.id });
  table.show(sessions);
  return table.node;
}
