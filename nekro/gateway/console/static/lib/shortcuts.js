/** Keys for people who use no mouse: "/" searches, "g" and a letter goes to a page, "?" lists them. */

import { el } from "./dom.js";
import { go, href } from "./router.js";
import { ask } from "./widgets.js";

const PAGES = { c: ["/chats", "Chats"], t: ["/turns", "Turns"], j: ["/jobs", "Jobs"], a: ["/approvals", "Approvals"], p: ["/plugins", "Plugins"], w: ["/operations", "Workers"] };
/** How long the second key may take. */
const SECOND_KEY_MILLISECONDS = 1500;

export function shortcuts() {
  let goes = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || document.querySelector("dialog[open]")) return;
    if (event.key === "/") {
      const search = document.querySelector("main input[type=search]");
      if (search) { event.preventDefault(); search.focus(); }
    } else if (event.key === "?") help();
    else if (event.key === "g") goes = Date.now();
    else if (PAGES[event.key] && Date.now() - goes < SECOND_KEY_MILLISECONDS) go(href(PAGES[event.key][0]));
  });
}

function isTyping(target) {
  return target.closest?.("input, textarea, select, [contenteditable]") !== null;
}

function help() {
  const rows = [["/", "Search on this page"], ["?", "This list"], ...Object.entries(PAGES).map(([key, [, name]]) => [`g ${key}`, name])];
  ask({
    title: "Keys",
    confirm: "Close",
    content: el("dl.pairs", {}, rows.map(([key, name]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, name)))),
  });
}
