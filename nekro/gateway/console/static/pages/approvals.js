/** Calls that wait for a person's decision, and those that were decided. */

import { get } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { href, remember } from "../lib/router.js";
import { badge } from "../lib/states.js";
import { empty, loaded, paged, pageHead, time } from "../lib/widgets.js";

export const title = "Approvals";
const STATES = [["pending", "Pending"], ["approved", "Approved"], ["denied", "Denied"], ["all", "All"]];

export function show(place, { query, signal }) {
  let state = query.get("state") ?? "pending";
  const list = el("div");
  const held = {};
  const buttons = STATES.map(([key, name]) => el("button", { type: "button", aria: { pressed: String(key === state) }, on: { click: () => {
    state = key;
    remember({ state: key === "pending" ? null : key });
    buttons.forEach((one, at) => one.setAttribute("aria-pressed", String(STATES[at][0] === state)));
    again();
  } } }, name));
  fill(place, pageHead({ title, lead: "Calls that may only run when a person agrees." }),
    el("div.toolbar", {}, el("div.segments", { role: "group", aria: { label: "State" } }, buttons)), list);
  const again = loaded(list, (how) => paged(
    (cursor) => get("/approvals", { state: state === "all" ? null : state, cursor, limit: 50 }, signal),
    (items) => el("ul.list", { role: "list" }, items.map(row)),
    { ...how, held, none: empty(state === "pending" ? "Nothing waits for you" : "Nothing here", state === "pending" ? "Calls that need approval appear here by themselves." : "") }), { signal });
  whenChanged(["approvals"], () => again({ quietly: true }), { signal });
}

function row(item) {
  return el("li", {}, el("a.list-link", { href: href("/approvals", item.id), data: { key: item.id } },
    el("span.list-main", {},
      el("span.list-title.mono", {}, item.summary ?? item.method),
      el("span.list-text", {}, [`No. ${item.number}`, item.chat_key, item.user_id ? `for ${item.user_id}` : null, item.decided_by ? `by ${item.decided_by}` : null].filter(Boolean).join(" · "))),
    el("span.list-side", {}, badge(item.state), item.state === "pending" ? ["expires ", time(item.expires_at, { relative: true })] : time(item.decided_at ?? item.requested_at))));
}
