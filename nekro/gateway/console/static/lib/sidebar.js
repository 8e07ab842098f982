/** The navigation: beside the page, or a drawer on a narrow screen. */

import { get, newest } from "./api.js";
import { whenChanged } from "./changes.js";
import { el, fill, setText } from "./dom.js";
import { icon } from "./icons.js";
import { go, href } from "./router.js";
import { logout, session } from "./session.js";
import { setTheme, theme, THEMES } from "./theme.js";
import { acting } from "./widgets.js";

const GROUPS = [
  ["Work", [["chats", "Chats"], ["turns", "Turns"], ["approvals", "Approvals"], ["jobs", "Jobs"], ["timers", "Timers"]]],
  ["System", [["plugins", "Plugins"], ["mcp", "MCP servers"], ["operations", "Workers and queues"], ["charts", "Charts"]]],
  ["Account", [["costs", "Costs"], ["keys", "Keys"]]],
];
const THEME_NAMES = { system: "System", light: "Light", dark: "Dark" };
const THEME_ICONS = { system: "system", light: "sun", dark: "moon" };

export function sidebar() {
  const links = new Map();
  const pending = el("span.count", { hidden: true });
  const groups = GROUPS.map(([title, entries]) => el("div.nav-group", {},
    el("p.nav-title", {}, title),
    el("ul", { role: "list" }, entries.map(([area, name]) => {
      const link = el("a.nav-link", { href: href(`/${area}`) }, icon(area), el("span", {}, name), area === "approvals" ? pending : null);
      links.set(area, link);
      return el("li", {}, link);
    }))));
  const account = el("div.account");
  const node = el("aside.sidebar", { id: "sidebar", aria: { label: "Console" } },
    el("a.brand", { href: href("/chats") }, el("img", { src: "/console/icon.svg", alt: "", width: "24", height: "24" }), "Nekro"),
    el("nav", { aria: { label: "Pages" } }, groups),
    el("div.sidebar-foot", {}, el("a.nav-link", { href: "/reference", target: "_blank" }, icon("external"), el("span", {}, "API reference")), themeSwitch(), account));
  const shade = el("div.shade", { on: { click: () => close() } });
  let opener = null;

  function close({ refocus = false } = {}) {
    if (!node.classList.contains("is-open")) return;
    node.classList.remove("is-open");
    shade.remove();
    opener?.setAttribute("aria-expanded", "false");
    if (refocus) opener?.focus();
  }

  function toggle(button) {
    opener = button;
    if (node.classList.contains("is-open")) return close();
    node.classList.add("is-open");
    node.after(shade);
    button.setAttribute("aria-expanded", "true");
    node.querySelector("a").focus();
  }

  const readPending = newest(() => get("/approvals", { state: "pending", limit: 50 }), ({ items, next_cursor: more }) => {
    pending.hidden = items.length === 0;
    setText(pending, more ? "50+" : items.length);
    pending.setAttribute("aria-label", `${items.length} pending`);
  });

  async function count() {
    if (document.body.classList.contains("is-login")) return;
    try {
      await readPending();
    } catch {
      pending.hidden = true; // the page that is shown reports what is wrong
    }
  }

  async function who() {
    try {
      fill(account, accountOf(await session({ again: true })));
    } catch {
      fill(account);
    }
  }

  node.addEventListener("keydown", (event) => { if (event.key === "Escape") close({ refocus: true }); });
  document.addEventListener("nekro:session", () => { who(); count(); });
  document.addEventListener("nekro:approvals", count);
  whenChanged(["approvals"], count, { signal: new AbortController().signal });
  who();
  count();
  return {
    node,
    toggle,
    close,
    mark(area) {
      for (const [name, link] of links) {
        if (name === area) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
      }
    },
  };
}

function accountOf(found) {
  const name = found.name ?? found.key_id ?? "local";
  const out = !found.csrf_token ? null : el("button.button.quiet.small", {
    type: "button",
    on: { click: acting(async () => { await logout(); go(href("/login")); }) },
  }, icon("logout"), el("span", {}, "Log out"));
  return [el("span.account-name", { title: name }, name), out];
}

function themeSwitch() {
  const buttons = THEMES.map((name) => el("button", {
    type: "button", data: { theme: name }, title: `${THEME_NAMES[name]} colours`, aria: { pressed: String(theme() === name), label: `${THEME_NAMES[name]} colours` },
    on: { click: () => { setTheme(name); buttons.forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.theme === name))); document.dispatchEvent(new Event("nekro:theme")); } },
  }, icon(THEME_ICONS[name])));
  return el("div.theme-switch", { role: "group", aria: { label: "Colours" } }, buttons);
}
