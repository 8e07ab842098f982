/** The frame of the console: navigation, the place of the page, theme, messages and login. */

import { whenLoginNeeded } from "./lib/api.js";
import { connect, disconnect, whenConnectionChanges } from "./lib/changes.js";
import { el, fill, setText } from "./lib/dom.js";
import { icon } from "./lib/icons.js";
import { go, here, href, match } from "./lib/router.js";
import { shortcuts } from "./lib/shortcuts.js";
import { sidebar } from "./lib/sidebar.js";
import { failed, loading, localClock, tickTimes } from "./lib/widgets.js";

/**
 * A page is a module with `title` and `show(place, context)`; it is loaded when it is first visited. One with a
 * stream of its own says itself when the connection is lost.
 */
const ROUTES = [
  { pattern: "/", page: () => import("./pages/chats.js"), area: "chats" },
  { pattern: "/chats", page: () => import("./pages/chats.js"), area: "chats" },
  { pattern: "/chats/:chat", page: () => import("./pages/talk.js"), area: "chats", hasOwnStream: true },
  { pattern: "/turns", page: () => import("./pages/turns.js"), area: "turns" },
  { pattern: "/turns/:turn", page: () => import("./pages/turn.js"), area: "chats", hasOwnStream: true },
  { pattern: "/jobs", page: () => import("./pages/jobs.js"), area: "jobs" },
  { pattern: "/jobs/:job", page: () => import("./pages/job.js"), area: "jobs" },
  { pattern: "/approvals", page: () => import("./pages/approvals.js"), area: "approvals" },
  { pattern: "/approvals/:approval", page: () => import("./pages/approval.js"), area: "approvals" },
  { pattern: "/timers", page: () => import("./pages/timers.js"), area: "timers" },
  { pattern: "/plugins", page: () => import("./pages/plugins.js"), area: "plugins" },
  { pattern: "/plugins/:plugin", page: () => import("./pages/plugin.js"), area: "plugins" },
  { pattern: "/mcp", page: () => import("./pages/mcp.js"), area: "mcp" },
  { pattern: "/operations", page: () => import("./pages/operations.js"), area: "operations" },
  { pattern: "/charts", page: () => import("./pages/charts.js"), area: "charts" },
  { pattern: "/costs", page: () => import("./pages/costs.js"), area: "costs" },
  { pattern: "/keys", page: () => import("./pages/keys.js"), area: "keys" },
  { pattern: "/login", page: () => import("./pages/login.js"), area: "login" },
];

const main = el("main", { id: "main", tabindex: "-1" });
const menu = sidebar();
const connection = el("p.live-state", { role: "status" });
const TICK_SECONDS = 5;
let visit = null;

function frame() {
  const skip = el("button.skip", { type: "button", on: { click: focusPage } }, "Skip to the page");
  const open = el("button.button.quiet.menu-button", { type: "button", aria: { expanded: "false", controls: "sidebar", label: "Menu" }, on: { click: () => menu.toggle(open) } }, icon("menu"));
  const bar = el("header.topbar", {}, open, el("a.brand", { href: href("/chats") }, brand(), "Nekro"));
  document.body.replaceChildren(skip, bar, menu.node, main,
    el("div.notes", { id: "notes", role: "status", aria: { live: "polite" } }),
    el("div.notes", { id: "alerts", role: "alert" }));
}

function brand() {
  return el("img", { src: "/console/icon.svg", alt: "", width: "24", height: "24" });
}

function focusPage() {
  (main.querySelector("h1") ?? main).focus();
}

/** Show the page of the present address; what the previous page had under way is stopped. */
async function show({ isFirst = false } = {}) {
  const { segments, query } = here();
  const found = match(ROUTES, segments);
  visit?.abort();
  visit = new AbortController();
  const { signal } = visit;
  menu.close();
  menu.mark(found?.route.area ?? null);
  document.body.classList.toggle("is-login", found?.route.area === "login");
  const place = el("div.page", { data: { area: found?.route.area ?? "none" } }, loading());
  fill(main, found?.route.hasOwnStream ? null : connection, place);
  window.scrollTo(0, 0);
  if (found?.route.area === "login") disconnect();
  else connect();
  try {
    if (!found) throw Object.assign(new Error(`There is no page at “${here().path}”.`), { status: 404 });
    const page = await found.route.page();
    if (signal.aborted) return;
    const setTitle = (title) => { document.title = `${title} · Nekro console`; };
    setTitle(page.title);
    await page.show(place, { params: found.params, query, signal, setTitle });
    if (!isFirst && !signal.aborted && document.activeElement === document.body) place.querySelector("h1")?.focus({ preventScroll: true });
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    fill(place, el("h1", { tabindex: "-1" }, error.status === 404 ? "Not found" : "Something went wrong"), failed(error, () => show()));
  }
}

whenLoginNeeded(() => {
  // The whole address: its query has the filters of the page.
  if (here().segments[0] !== "login") go(`${href("/login")}?next=${encodeURIComponent(location.hash.slice(1))}`, { replace: true });
});
whenConnectionChanges((state, error) => {
  if (state === "live") setText(connection, "");
  else if (state === "waiting") setText(connection, error?.status ? `This page is not live now: ${error.message}` : "The connection is lost; trying again…");
  // A key that may list nothing has nothing that could change; without a session the login is shown.
  else if (state === "refused" && ![401, 403].includes(error?.status)) setText(connection, "Live updates were refused; reload the page.");
});
localClock(TICK_SECONDS, tickTimes);
window.addEventListener("hashchange", () => show());
frame();
shortcuts();
show({ isFirst: true });
