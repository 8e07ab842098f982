/** What happened over time: turns, failures, how long turns took, tokens and cost. */

import { get } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { chart, roundUpLength } from "../lib/chart.js";
import { el, fill } from "../lib/dom.js";
import { cost, count, dayOf, duration, when } from "../lib/format.js";
import { remember } from "../lib/router.js";
import { empty, loaded, pageHead } from "../lib/widgets.js";

export const title = "Charts";
const HOUR = 3_600_000;
const DAY = 24 * HOUR;
/** Name, words, and how far before now the first interval begins. */
const RANGES = [["24h", "24 hours", 23 * HOUR], ["3d", "3 days", 71 * HOUR], ["7d", "7 days", 6 * DAY], ["30d", "30 days", 29 * DAY], ["90d", "90 days", 89 * DAY]];
/** The figures are counted anew, so not for each round that ends. */
const PAUSE_MILLISECONDS = 15_000;

export function show(place, { query, signal }) {
  let range = RANGES.find(([key]) => key === query.get("range")) ?? RANGES[0];
  const list = el("div");
  const buttons = RANGES.map((one) => el("button", { type: "button", aria: { pressed: String(one === range) }, on: { click: () => {
    range = one;
    remember({ range: one[0] });
    buttons.forEach((other, at) => other.setAttribute("aria-pressed", String(RANGES[at] === range)));
    again();
  } } }, one[1]));
  fill(place, pageHead({ title, lead: "Turns count where they ended. A key without the scope admin sees what it pays for." }),
    el("div.toolbar", {}, el("div.segments", { role: "group", aria: { label: "Time shown" } }, buttons)), list);
  const again = loaded(list, async () => view(await get("/series", { since: new Date(Date.now() - range[2]).toISOString() }, signal)), { signal });
  whenChanged(["turns", "costs"], () => again({ quietly: true }), { signal, pause: PAUSE_MILLISECONDS });
}

const doneOf = (point) => point.turns - point.failed - point.cancelled;
const sum = (points, read) => points.reduce((total, point) => total + read(point), 0);

function view({ interval, points, complete_since: since }) {
  const turns = sum(points, (one) => one.turns);
  if (!turns && !points.some((one) => one.requests || one.prompt_tokens || one.cost)) return empty("Nothing happened", "No turn ended in this time, and nothing was spent.");
  const frame = { points, labelOf: (point) => interval === "day" ? dayOf(point.begins_at) : when(point.begins_at), intervalName: interval === "day" ? "Day (UTC)" : "Hour" };
  const failed = sum(points, (one) => one.failed);
  return el("div.page", {},
    since ? el("p.quiet-text", { role: "note" }, `There is too much to count in this time: figures before ${when(since)} are left out.`) : null,
    el("dl.figures", {}, [
      ["Turns", count(turns)],
      ["Failed", turns ? `${count(failed)} (${Math.round((failed / turns) * 100)} %)` : "0"],
      ["Requests to models", count(sum(points, (one) => one.requests))],
      ["Tokens", count(sum(points, (one) => one.prompt_tokens + one.completion_tokens))],
      ["Cost", cost(sum(points, (one) => one.cost))],
    ].map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("div.charts", {},
      chart("Turns", { ...frame, format: count, columns: [
        { name: "Done", tone: "done", of: doneOf }, { name: "Cancelled", tone: "rest", of: (one) => one.cancelled }, { name: "Failed", tone: "bad", of: (one) => one.failed },
      ] }),
      chart("Failed turns", { ...frame, format: count, columns: [{ name: "Failed", tone: "bad", of: (one) => one.failed }] }),
      chart("Time of turns", { ...frame, format: duration, isLines: true, round: roundUpLength, columns: [
        { name: "Median", tone: "done", of: (one) => one.turn_p50_ms }, { name: "95 %", tone: "high", of: (one) => one.turn_p95_ms },
      ] }),
      chart("Tokens", { ...frame, format: count, columns: [
        { name: "In", tone: "done", of: (one) => one.prompt_tokens }, { name: "Out", tone: "model", of: (one) => one.completion_tokens },
      ] }),
      chart("Cost", { ...frame, format: cost, columns: [{ name: "Cost", tone: "model", of: (one) => one.cost }] })));
}
