/**
 * Where the time of a turn went: rows for the model, the code and each worker, with a bar for what each did.
 *
 * It is one picture for screen readers; the calls below it have all of it as text.
 */

import { el, fill } from "../../lib/dom.js";
import { duration, moment, several } from "../../lib/format.js";
import { toneOf } from "../../lib/states.js";

/** Parallel calls of a worker are stacked; more than these share the last line. */
const MOST_LANES = 6;
/** Parts of the width: bars that are nearer than this are drawn as one. */
const GRAIN = 1 / 900;
const TICKS = 5;

export class Waterfall {
  constructor(onPick) {
    this.onPick = onPick;
    this.rows = el("div.waterfall-rows");
    this.axis = el("div.waterfall-axis");
    this.plot = el("div.waterfall", { role: "img" }, this.axis, this.rows);
    this.node = el("section.card.timeline", { aria: { label: "Time" } },
      el("div.split", {}, el("h2", {}, "Time"), legend()), this.plot);
    this.plot.addEventListener("click", (event) => {
      const target = event.target.closest("[data-call]");
      if (target) this.onPick(target.dataset.call);
    });
  }

  /** Draw a turn. */
  update(model) {
    const rounds = [...model.rounds.values()];
    const { start, end } = spanOf(model);
    const scale = { start, length: Math.max(1, end - start) };
    const workers = byWorker(rounds);
    this.plot.setAttribute("aria-label", described(model, workers, end - start));
    fill(this.axis, el("span.waterfall-label"), el("div.waterfall-track", {}, ticks(scale)));
    fill(this.rows,
      row("Model", [rounds.flatMap((round) => modelBars(round, scale, end))]),
      row("Code", [rounds.flatMap((round) => codeBars(round, scale, end))]),
      [...workers].map(([name, calls]) => row(name, packed(calls, scale, end), { isWorker: true })));
  }
}

/** First and last moment of a turn, in milliseconds; a running one lasts until now. */
export function spanOf(model) {
  const start = moment(model.turn.requested_at) ?? Date.now();
  const times = [...model.rounds.values()].flatMap((round) => [round.finished_at, ...[...round.calls.values()].map((call) => call.finished_at)]).map(moment);
  const last = times.reduce((found, one) => Math.max(found, one ?? 0), moment(model.turn.finished_at) ?? start);
  return { start, end: model.isEnded ? last : Math.max(last, Date.now()) };
}

function byWorker(rounds) {
  const workers = new Map();
  for (const round of rounds) {
    for (const call of round.calls.values()) {
      const name = call.worker || (call.lane ? `${call.lane}, ${call.finished_at ? "ended" : "waiting"}` : "unknown worker");
      if (!workers.has(name)) workers.set(name, []);
      workers.get(name).push(call);
    }
  }
  return new Map([...workers].sort(([one], [other]) => one.localeCompare(other)));
}

function modelBars(round, scale, now) {
  const asked = moment(round.started_at);
  const open = ["requested", "running"].includes(round.state);
  const wait = bar("wait", moment(round.requested_at), asked ?? (open ? now : moment(round.finished_at)), scale, `Round ${round.number} waits`);
  const answered = moment(round.answered_at) ?? (open ? now : moment(round.finished_at));
  return [wait, asked === null ? null : bar("model", asked, answered, scale, `Round ${round.number}: the model answers`)];
}

function codeBars(round, scale, now) {
  const from = moment(round.answered_at);
  if (from === null || !round.code) return [];
  const until = moment(round.finished_at) ?? now;
  return [bar(round.state === "failed" || round.stop_type === "ERROR" ? "bad" : "code", from, until, scale, `Round ${round.number}: the code runs`)];
}

/** Lay calls that overlap on lines of their own; those that are too near to tell apart become one bar. */
function packed(calls, scale, now) {
  const lanes = [];
  const sorted = [...calls].sort((one, other) => (moment(one.requested_at) ?? 0) - (moment(other.requested_at) ?? 0));
  for (const call of sorted) {
    const from = moment(call.requested_at);
    if (from === null) continue;
    const until = moment(call.finished_at) ?? now;
    const started = moment(call.started_at) ?? (call.finished_at ? from : until);
    let lane = lanes.find((one) => one.end <= from);
    if (!lane) {
      lane = lanes.length < MOST_LANES ? { end: 0, bars: [] } : lanes.at(-1);
      if (!lanes.includes(lane)) lanes.push(lane);
    }
    lane.end = Math.max(lane.end, until);
    put(lane.bars, { call, from, started: Math.min(started, until), until, tone: toneOf(call.state) === "bad" ? "bad" : "call" }, scale);
  }
  return lanes.map((lane) => lane.bars.flatMap((one) => callBars(one, scale)));
}

function put(bars, one, scale) {
  const last = bars.at(-1);
  const grain = scale.length * GRAIN;
  const isNear = last && one.from - last.until < grain && one.until - one.from < 3 * grain && last.tone === one.tone;
  if (!isNear) bars.push({ ...one, count: 1 });
  else Object.assign(last, { until: Math.max(last.until, one.until), count: last.count + 1 });
}

function callBars({ call, from, started, until, tone, count }, scale) {
  const title = count > 1 ? several(count, "call") : `${call.method} · waited ${duration(started - from)}, ran ${duration(until - started)}`;
  if (count > 1) return [bar(tone, from, until, scale, title, call.id)];
  return [started > from ? bar("wait", from, started, scale, title, call.id) : null, bar(tone, started, until, scale, title, call.id)];
}

function bar(kind, from, until, { start, length }, title, callId = null) {
  if (from === null || until === null) return null;
  const left = (from - start) / length;
  const width = Math.max(0, until - from) / length;
  return el("span.bar", { title, data: callId ? { kind, call: callId } : { kind }, style: { left: percent(left), width: percent(width) } });
}

const percent = (part) => `${(Math.max(0, Math.min(1, part)) * 100).toFixed(3)}%`;

function row(name, lanes, { isWorker = false } = {}) {
  if (!lanes.flat().filter(Boolean).length) return null;
  return el("div.waterfall-row", {}, el("span.waterfall-label", { title: name, class: isWorker ? "mono" : "" }, isWorker ? shortName(name) : name),
    el("div.waterfall-track", {}, lanes.map((bars) => el("div.waterfall-lane", {}, bars))));
}

/** "methods@host:123" as "methods:123". */
const shortName = (name) => name.replace(/@[^:]*:/, ":");

function ticks({ length }) {
  return Array.from({ length: TICKS }, (_, at) => el("span.waterfall-tick", { style: { left: percent(at / (TICKS - 1)) } }, at === 0 ? "0" : duration((length * at) / (TICKS - 1))));
}

function legend() {
  return el("ul.legend", { role: "list", aria: { label: "Colours" } }, [["wait", "waiting"], ["model", "model"], ["code", "code"], ["call", "call"], ["bad", "failed"]].map(([kind, name]) =>
    el("li", {}, el("span.legend-mark", { data: { kind } }), name)));
}

function described(model, workers, length) {
  const calls = [...workers.values()].reduce((sum, list) => sum + list.length, 0);
  return `${several(model.rounds.size, "round")} in ${duration(length)}; ${several(calls, "call")} on ${several(workers.size, "worker")}.`;
}
