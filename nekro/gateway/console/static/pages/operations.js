/** Workers, queues and dead letters, and who did what. */

import { get, path, post, remove } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { bytes, count, several } from "../lib/format.js";
import { href } from "../lib/router.js";
import { badge } from "../lib/states.js";
import { inline } from "../lib/values.js";
import { acting, age, ask, button, empty, field, loaded, paged, pageHead, say, section, table, time } from "../lib/widgets.js";

export const title = "Workers and queues";

export function show(place, { signal }) {
  const workers = el("div");
  const queues = el("div");
  const letters = el("div");
  const acts = el("div");
  fill(place, pageHead({ title }), section("Queues", queues), section("Workers", workers), section("Dead letters", el("p.quiet-text", {}, "Messages that no worker can run. They stay until a person decides."), letters), section("Who did what", acts));
  const ofActs = {};
  const ofLetters = {};
  const readQueues = loaded(queues, async () => queueTable(await get("/queues", {}, signal)), { signal, lines: 2 });
  const readWorkers = loaded(workers, async () => workerTable((await get("/workers", {}, signal)).items), { signal, lines: 2 });
  const readActs = loaded(acts, (how) => paged((cursor) => get("/audit", { cursor, limit: 20 }, signal), actTable, { ...how, held: ofActs, none: empty("Nothing yet") }), { signal, lines: 2 });
  const readLetters = loaded(letters, (how) => paged((cursor) => get("/dead-letters", { cursor, limit: 20 }, signal), (items) => letterTable(items, changed), { ...how, held: ofLetters, none: empty("No dead letters", "All messages could be run.") }), { signal, lines: 2 });
  // Queues are shown with the number of dead letters.
  whenChanged(["queues", "dead_letters"], () => readQueues({ quietly: true }), { signal });
  whenChanged(["workers"], () => readWorkers({ quietly: true }), { signal });
  whenChanged(["dead_letters"], () => readLetters({ quietly: true }), { signal });
  whenChanged(["audit"], () => readActs({ quietly: true }), { signal });

  function changed() {
    readLetters({ quietly: true });
    readActs({ quietly: true });
    readQueues({ quietly: true });
  }
}

function queueTable({ queues, rounds, jobs, programs, dead_letters: dead, brokers }) {
  const rows = [
    ...queues.map((one) => ({ name: one.lane, waiting: one.waiting, running: one.held, oldest: one.oldest_seconds })),
    { name: "rounds in all chats", ...rounds, oldest: rounds.waiting ? rounds.oldest_seconds : null },
    { name: "jobs", ...jobs, oldest: jobs.waiting ? jobs.oldest_seconds : null },
    { name: el("a", { href: `${href("/turns")}?state=waiting` }, "programs that wait"), ...programs, oldest: programs.waiting ? programs.oldest_seconds : null },
  ];
  return el("div", {}, table("Queues", [
    { title: "Queue", cell: (one) => one.name },
    { title: "Waiting", class: "number", cell: (one) => count(one.waiting) },
    { title: "Running", class: "number", cell: (one) => count(one.running) },
    { title: "Oldest", class: "number", cell: (one) => age(one.oldest) },
  ], rows, { isSmall: true }), dead ? el("p.fault.after-table", {}, several(dead, "dead letter")) : null, brokers.length > 1 ? brokerTable(brokers) : null);
}

/** The brokers that chats are partitioned over. */
function brokerTable(brokers) {
  return table("Brokers", [
    { title: "Broker", cell: (one) => el("span.mono", {}, one.name) },
    { title: "Messages", class: "number", cell: (one) => count(one.messages) },
    { title: "State", class: "tight", cell: (one) => one.is_up ? badge("live", one.is_drained ? "Drained" : "Live") : badge("failed", "Does not answer") },
  ], brokers, { isSmall: true });
}

function workerTable(items) {
  if (!items.length) return empty("No workers", "Start one with “nekro worker” or “nekro up”.");
  const sorted = [...items].sort((one, other) => Number(other.is_live) - Number(one.is_live) || one.lane.localeCompare(other.lane) || one.name.localeCompare(other.name));
  return table("Workers", [
    { title: "Worker", cell: (one) => el("span.mono", {}, one.name) },
    { title: "Lane", cell: (one) => one.lane },
    { title: "Host", cell: (one) => el("span.stack", {}, `${one.host}, process ${one.pid}`, one.release ? el("span.quiet-text", {}, `release ${one.release}`) : null) },
    { title: "Runs", cell: (one) => runs(one) },
    { title: "Started", cell: (one) => time(one.started_at) },
    { title: "State", class: "tight", cell: (one) => badge(one.is_live ? "live" : "gone") },
  ], sorted);
}

/** What a worker runs now; calls of tools are not counted. */
function runs({ running_calls: calls, running_rounds: rounds, running_jobs: jobs }) {
  return [rounds ? several(rounds, "round") : null, calls ? several(calls, "call") : null, jobs ? several(jobs, "job") : null].filter(Boolean).join(", ") || "–";
}

function letterTable(items, onChange) {
  return table("Dead letters", [
    { title: "Message", cell: (one) => el("span.stack", {}, el("span.mono", {}, one.task ?? "unknown task"), el("span.quiet-text.mono", {}, one.id)) },
    { title: "Why", cell: (one) => el("span.stack", {}, el("span", {}, one.reason), el("span.quiet-text", {}, `${one.source === "refused" ? "refused" : "given up"} · ${several(one.deliveries, "delivery", "deliveries")} · ${bytes(one.bytes)}${one.lane ? ` · ${one.lane}` : ""}`)) },
    { title: "", class: "tight", cell: (one) => el("span.row", {},
      button("Retry", acting(() => retry(one, onChange)), { kind: "small", label: `Retry message ${one.id}`, data: { key: `retry-${one.id}` } }),
      button("Drop", acting(() => drop(one, onChange)), { kind: "small danger", label: `Drop message ${one.id}`, data: { key: `drop-${one.id}` } })) },
  ], items, { keyOf: (one) => one.id });
}

async function retry(letter, onChange) {
  const full = await get(path("/dead-letters", letter.id));
  const seconds = el("input", { type: "number", min: "1", max: "86400", step: "1" });
  const content = [
    el("p.mono", {}, letter.task ?? letter.id),
    el("p.quiet-text", {}, `Signature: ${full.signature ?? "unknown"}${full.chat_key ? ` · chat ${full.chat_key}` : ""}`),
    field("Time limit in seconds", seconds, { optional: true, hint: "Empty keeps its deadline." }),
  ];
  const sent = await ask({ title: "Send it again?", content, confirm: "Retry", read: () => post(`${path("/dead-letters", letter.id)}/retry`, { timeout_seconds: seconds.value ? Number(seconds.value) : null }) });
  if (!sent) return;
  say("Sent again.");
  onChange();
}

async function drop(letter, onChange) {
  const gone = await ask({ title: "Drop this message?", content: el("p.mono", {}, letter.task ?? letter.id), confirm: "Drop", danger: true, read: () => remove(path("/dead-letters", letter.id)) });
  if (!gone) return;
  say("Dropped.");
  onChange();
}

function actTable(items) {
  return table("Administrative acts", [
    { title: "When", class: "tight", cell: (one) => time(one.at) },
    { title: "Act", class: "tight", cell: (one) => one.action },
    { title: "Of what", cell: (one) => el("span.mono", {}, one.subject) },
    { title: "Who", class: "tight", cell: (one) => one.key_id ? el("a", { href: href("/keys") }, `key ${one.key_id}`) : "this machine" },
    { title: "More", cell: (one) => one.data ? el("span.mono.quiet-text", {}, inline(one.data, 100)) : "" },
  ], items);
}
