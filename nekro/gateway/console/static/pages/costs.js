/** What the models cost: per day, chat, plugin, model, user or key; and budgets. */

import { get } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { cost, count, duration, several } from "../lib/format.js";
import { href, remember } from "../lib/router.js";
import { badge } from "../lib/states.js";
import { empty, field, loaded, meter, pageHead, section, select, table, time } from "../lib/widgets.js";

export const title = "Costs";
const KINDS = [["day", "Day"], ["chat", "Chat"], ["plugin", "Plugin"], ["model", "Model"], ["user", "User"], ["key", "Key"]];
const PERIODS = [["7", "7 days"], ["30", "30 days"], ["90", "90 days"]];
const MEASURES = [["cost", "Cost"], ["tokens", "Tokens"], ["rounds", "Rounds"]];
const DAY_MILLISECONDS = 86_400_000;
/** The sums are read in full, so not for each round that ends. */
const PAUSE_MILLISECONDS = 5_000;

export function show(place, { query, signal }) {
  const chosen = { by: query.get("by") ?? "day", days: query.get("days") ?? "30", measure: query.get("measure") ?? "cost" };
  const list = el("div");
  const pick = (name) => (event) => { chosen[name] = event.target.value; remember(chosen); again(); };
  fill(place, pageHead({ title, lead: "Amounts are in the currency in which prices are set." }),
    el("div.toolbar.choosers", {},
      field("Per", select(KINDS, chosen.by, { on: { change: pick("by") } })),
      field("Of the last", select(PERIODS, chosen.days, { on: { change: pick("days") } })),
      field("Bars show", select(MEASURES, chosen.measure, { on: { change: pick("measure") } }))),
    list);
  const again = loaded(list, async () => {
    const asked = { ...chosen }; // what is chosen may change until the answer
    const since = new Date(Date.now() - (Number(asked.days) - 1) * DAY_MILLISECONDS).toISOString().slice(0, 10);
    const found = await all({ by: asked.by, since }, signal);
    return el("div.page", {}, totals(found.items), estimates(found.items), found.items.length ? bars(found.items, asked) : empty("Nothing was spent", "No round asked a model in this time."), budgets(found.budgets));
  }, { signal });
  whenChanged(["costs"], () => again({ quietly: true }), { signal, pause: PAUSE_MILLISECONDS });
}

async function all(query, signal) {
  const found = await get("/costs", { ...query, limit: 200 }, signal);
  const items = [...found.items];
  let cursor = found.next_cursor;
  while (cursor && items.length < 2000) {
    const more = await get("/costs", { ...query, limit: 200, cursor }, signal);
    items.push(...more.items);
    cursor = more.next_cursor;
  }
  return { items, budgets: found.budgets ?? [] };
}

const tokensOf = (item) => (item.prompt_tokens ?? 0) + (item.completion_tokens ?? 0);
const figureOf = (item, measure) => ({ cost: item.cost ?? 0, tokens: tokensOf(item), rounds: item.rounds ?? 0 })[measure];
const sum = (items, read) => items.reduce((total, item) => total + (read(item) ?? 0), 0);

function totals(items) {
  return el("dl.figures", {}, [
    ["Cost", cost(sum(items, (one) => one.cost))],
    ["Tokens in", count(sum(items, (one) => one.prompt_tokens))],
    ["Tokens out", count(sum(items, (one) => one.completion_tokens))],
    ["Rounds", count(sum(items, (one) => one.rounds))],
  ].map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** Says that some figures are no counts of an endpoint; null if all are. */
function estimates(items) {
  const requests = sum(items, (one) => one.estimated_requests);
  return requests ? el("p.quiet-text", {}, `Tokens and cost of ${several(requests, "request")} are estimated: the endpoint reported none, or the request is running or was lost with its worker.`) : null;
}

function bars(items, { by, measure }) {
  const isEstimated = items.some((item) => item.estimated_requests);
  const most = Math.max(...items.map((item) => figureOf(item, measure)), 0);
  const sorted = by === "day" ? [...items].sort((one, other) => String(other.key).localeCompare(String(one.key))) : [...items].sort((one, other) => figureOf(other, measure) - figureOf(one, measure));
  return table(`Costs per ${by}`, [
    { title: KINDS.find(([key]) => key === by)?.[1] ?? by, cell: (item) => by === "chat" && item.key ? el("a", { href: href("/chats", item.key) }, item.key) : item.key || "–" },
    { title: MEASURES.find(([key]) => key === measure)[1], class: "bar-cell", cell: (item) => el("span.cost-bar", { aria: { hidden: true } }, el("span.cost-bar-fill", { style: { width: `${most ? (figureOf(item, measure) / most) * 100 : 0}%` } })) },
    { title: "Cost", class: "number", cell: (item) => cost(item.cost) },
    { title: "Tokens in", class: "number", cell: (item) => count(item.prompt_tokens) },
    { title: "Tokens out", class: "number", cell: (item) => count(item.completion_tokens) },
    ...(isEstimated ? [{ title: "Estimated", class: "number", cell: (item) => item.estimated_requests ? count(item.estimated_requests) : "–" }] : []),
    { title: "Rounds", class: "number", cell: (item) => count(item.rounds) },
    { title: "Sandbox", class: "number", cell: (item) => item.sandbox_seconds ? duration(item.sandbox_seconds * 1000) : "–" },
  ], sorted, { keyOf: (item) => item.key });
}

/** A figure of any measure: costs are fractions, the others mostly whole. */
const amount = (figure) => (figure >= 1 ? count(Math.round(figure * 100) / 100) : cost(figure));

function budgets(items) {
  if (!items.length) return null;
  return section("Budgets", el("ul.form", { role: "list" }, items.map((one) => {
    const percent = one.limit ? Math.round((one.used / one.limit) * 100) : 0;
    const period = one.period === "turn" ? "per turn" : `on ${one.period}`;
    const name = one.scope === "day" ? "The whole system" : `${one.scope} ${one.id}`;
    const bar = meter(Math.min(percent, 100), `Budget of ${name}`);
    bar.dataset.tone = percent >= 100 ? "bad" : percent >= 80 ? "wait" : "good";
    return el("li.budget", {}, el("div.split", {}, el("span", {}, name, el("span.quiet-text", {}, ` · ${one.measure.replace("_", " ")} ${period}`)), badge(one.state ?? "ok")),
      bar, el("p.quiet-text", {}, `${amount(one.used)} of ${amount(one.limit)} (${percent} %)`, one.estimated_requests ? ` · ${several(one.estimated_requests, "request")} estimated` : null, one.renews_at ? [" · renews ", time(one.renews_at, { relative: true })] : null));
  })));
}
