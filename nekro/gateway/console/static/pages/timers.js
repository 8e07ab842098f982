/** Timers of all chats: when they fire, and pause, resume and delete. */

import { get, patch, path, remove } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { href } from "../lib/router.js";
import { badge } from "../lib/states.js";
import { acting, ask, button, empty, loaded, paged, pageHead, say, table, time } from "../lib/widgets.js";

export const title = "Timers";

export function show(place, { signal }) {
  const list = el("div");
  const held = {};
  fill(place, pageHead({ title, lead: "The agent wakes at these times. A timer with an owner calls its plugin in that worker instead." }), list);
  const again = loaded(list, (how) => paged((cursor) => get("/timers", { cursor, limit: 100 }, signal),
    (items) => table("Timers", columns(() => again({ quietly: true })), items, { keyOf: (one) => one.id }),
    { ...how, held, none: empty("No timers", "Plugins and the agent set timers.") }), { signal });
  whenChanged(["timers"], () => again({ quietly: true }), { signal });
}

function columns(onChange) {
  const called = (one) => one.title || one.description || one.id;
  return [
    { title: "What", cell: (one) => el("span.stack", {}, el("span", {}, one.title || one.description || "–"), one.title && one.description ? el("span.quiet-text", {}, one.description) : null) },
    { title: "Chat", cell: (one) => el("a", { href: href("/chats", one.chat_key) }, one.chat_key) },
    { title: "Fires", cell: (one) => time(one.fires_at, { relative: true }) },
    { title: "Repeats", cell: (one) => one.schedule ? el("span.stack", {}, el("code", {}, one.schedule), el("span.quiet-text", {}, one.timezone ?? "")) : "once" },
    { title: "Last", cell: (one) => time(one.last_fired_at) },
    { title: "Owner", cell: (one) => one.owner ? el("span.stack", {}, el("span", {}, one.owner), el("span.quiet-text", {}, one.plugin)) : null },
    { title: "State", class: "tight", cell: (one) => badge(one.state) },
    { title: "", class: "tight", cell: (one) => one.owner ? null : el("span.row", {},
      button(one.state === "paused" ? "Resume" : "Pause", acting(async () => {
        await patch(path("/timers", one.id), { state: one.state === "paused" ? "waiting" : "paused" });
        onChange();
      }), { kind: "small", label: `${one.state === "paused" ? "Resume" : "Pause"} “${called(one)}”`, data: { key: `pause-${one.id}` } }),
      button("Delete", acting(async () => {
        if (!await ask({ title: "Delete this timer?", content: el("p", {}, one.title || one.description), confirm: "Delete", danger: true })) return;
        await remove(path("/timers", one.id));
        say("The timer is deleted.");
        onChange();
      }), { kind: "small danger", label: `Delete “${called(one)}”`, data: { key: `delete-${one.id}` } })) },
  ];
}
