// Actions: each asks first.

import { act } from "./api.js";
import { say } from "./dom.js";
import { t } from "./i18n.js";

/** Ask, do it, and say what came of it; resolves to whether it was done. */
export function confirmed(name, values, run) {
  const dialog = document.getElementById("ask");
  const yes = document.getElementById("ask-yes");
  const no = document.getElementById("ask-no");
  const error = document.getElementById("ask-error");
  say(document.getElementById("ask-title"), t(`act.${name}.title`));
  say(document.getElementById("ask-text"), t(`act.${name}.text`, ...values));
  say(yes, t(`act.${name}`));
  error.hidden = true;
  yes.disabled = false;
  const before = document.activeElement;
  return new Promise((resolve) => {
    let isDone = false;
    no.onclick = () => dialog.close();
    yes.onclick = async () => {
      yes.disabled = true;
      error.hidden = true;
      try {
        await run();
        isDone = true;
        say(document.getElementById("news"), t("act.done"));
        dialog.close();
      } catch (problem) {
        say(error, t("error", problem.message));
        error.hidden = false;
        yes.disabled = false;
      }
    };
    dialog.onclose = () => {
      before?.focus?.();
      resolve(isDone);
    };
    dialog.showModal();
    no.focus();
  });
}

export const closeSession = (id, shown) =>
  confirmed("close", [shown], () => act("/api/session/close", { session_id: id }));

export const suspendSession = (id, shown) =>
  confirmed("suspend", [shown], () => act("/api/session/suspend", { session_id: id }));

export const retryDeadLetters = (chunks) =>
  confirmed("retry", [chunks], () => act("/api/dead-letters/retry"));

export const pausePrefetching = (paused) =>
  confirmed(paused ? "pause" : "unpause", [], () => act("/api/prefetching", { paused }));
