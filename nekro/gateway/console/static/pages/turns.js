/** Turns of all chats, by state, time, model, plugin and cost. The address has the filters, so it can be shared. */

import { get, path } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { between, cost, duration, moment, several, short, waitText } from "../lib/format.js";
import { href, remember } from "../lib/router.js";
import { badge, wordOf } from "../lib/states.js";
import { button, empty, field, loaded, paged, pageHead, time } from "../lib/widgets.js";

export const title = "Turns";
const STATES = ["failed", "waiting", "running", "done", "cancelled"];
/** Of the API, which has their names; times are in UTC in the address and local in the fields. */
const FILTERS = ["state", "since", "until", "model", "plugin", "min_cost"];
/** Lists of many chats change all the time. */
const PAUSE_MILLISECONDS = 2_000;

export function show(place, { query, signal }) {
  const chosen = Object.fromEntries([...FILTERS, "chat"].map((name) => [name, query.get(name) ?? ""]));
  const list = el("div");
  const held = {};
  const controls = {};
  const choose = (name, value) => { chosen[name] = value; remember({ [name]: value }); draw(); again(); };
  const text = (name, label, options = {}) => {
    controls[name] = el("input", { autocomplete: "off", ...options, on: { change: () => choose(name, controls[name].value.trim()) } });
    return field(label, controls[name]);
  };
  const moments = (name, label) => {
    controls[name] = el("input", { type: "datetime-local", on: { change: () => choose(name, controls[name].value ? new Date(controls[name].value).toISOString() : "") } });
    return field(label, controls[name]);
  };
  const buttons = ["", ...STATES].map((state) => el("button", { type: "button", data: { state }, on: { click: () => choose("state", state) } }, state ? wordOf(state) : "All"));
  const clear = button("Clear filters", () => { for (const name of Object.keys(chosen)) chosen[name] = ""; remember(chosen); draw(); again(); });
  fill(place, pageHead({ title, lead: "What messages, calls, timers and jobs caused, in all chats." }),
    el("div.toolbar", {}, el("div.segments", { role: "group", aria: { label: "State" } }, buttons)),
    el("div.toolbar.choosers", {},
      moments("since", "From"), moments("until", "Before"),
      text("plugin", "Plugin called", { placeholder: "author.module" }), text("model", "Model"),
      text("min_cost", "Cost at least", { type: "number", min: "0", step: "any" }), text("chat", "Chat"), clear),
    list);

  function draw() {
    for (const [name, control] of Object.entries(controls)) control.value = ["since", "until"].includes(name) ? local(chosen[name]) : chosen[name];
    for (const one of buttons) one.setAttribute("aria-pressed", String(one.dataset.state === chosen.state));
    clear.hidden = !Object.values(chosen).some(Boolean);
  }

  draw();
  const again = loaded(list, (how) => paged(
    (cursor) => get(chosen.chat ? `${path("/chats", chosen.chat)}/turns` : "/turns", { ...Object.fromEntries(FILTERS.map((name) => [name, chosen[name] || null])), cursor, limit: 50 }, signal),
    (items) => el("ul.list", { role: "list" }, items.map(turnRow)),
    { ...how, held, none: clear.hidden ? empty("No turns yet", "A turn begins with a message, a timer or a job.") : empty("Nothing found", "No turn fits these filters.") }), { signal });
  whenChanged(["turns"], () => again({ quietly: true }), { signal, pause: PAUSE_MILLISECONDS });
}

function turnRow(turn) {
  const facts = [
    turn.chat_key,
    turn.models.join(", "),
    several(turn.rounds, "round"),
    turn.finished_at ? duration(between(turn.requested_at, turn.finished_at)) : null,
    ...(turn.waits ?? []).map(waitText),
    turn.cost === null ? null : `cost ${cost(turn.cost)}${turn.tokens_estimated ? " (estimated)" : ""}`,
  ];
  return el("li", {}, el("a.list-link", { href: href("/turns", turn.id), data: { key: turn.id } },
    el("span.list-main", {},
      el("span.list-title", {}, short(turn.text, 110) || `Started by a ${turn.cause.kind}`),
      turn.error ? el("span.list-text", {}, `${turn.error.code}: ${short(turn.error.text, 160)}`) : null,
      el("span.list-text", {}, facts.filter(Boolean).join(" · "))),
    el("span.list-side", {}, time(turn.requested_at), badge(turn.waits_for?.length ? "awaiting" : turn.state))));
}

/** A time of the address as a field for local times takes it. */
function local(text) {
  const at = moment(text);
  if (at === null) return "";
  return new Date(at - new Date(at).getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}
