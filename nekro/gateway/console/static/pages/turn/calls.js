/** The calls of a round: one row each, which opens to arguments, result and error. */

import { el, fill, setText } from "../../lib/dom.js";
import { bytes, duration, moment, several } from "../../lib/format.js";
import { icon } from "../../lib/icons.js";
import { href } from "../../lib/router.js";
import { badge, toneOf, wordOf } from "../../lib/states.js";
import { inline, inlineArguments, notKept, textView, valueView } from "../../lib/values.js";
import { acting, button, factRow, time } from "../../lib/widgets.js";

/** Rounds with more calls get a filter. */
const FILTER_FROM = 12;
/** From so many rows on, the layout of those out of sight is skipped. */
const LONG_FROM = 60;
/** Rows that are made at first; more are made on demand. */
const MOST_ROWS = 3000;

export class CallList {
  /**
   * @param {function(): {start: number, end: number}} span the time that the small bars cover
   * @param {function(object)} onContinue goes on from a call in a new chat
   */
  constructor(span, onContinue) {
    Object.assign(this, { span, onContinue });
    this.rows = new Map();
    this.calls = new Map();
    this.filter = { text: "", state: "all" };
    this.most = MOST_ROWS;
    this.list = el("ul.calls", { role: "list" });
    this.head = el("div.calls-head");
    this.tools = null;
    this.more = button("", () => { this.most += MOST_ROWS; this.update(this.calls); }, { kind: "wide", hidden: true });
    this.node = el("div.calls-part", {}, this.head, this.list, this.more);
  }

  /** Show all calls of a round; rows of unchanged calls stay as they are. */
  update(calls) {
    this.calls = calls;
    this.count();
    const wanted = [];
    let hidden = 0;
    for (const call of calls.values()) {
      if (!this.fits(call)) continue;
      if (wanted.length >= this.most) { hidden += 1; continue; }
      wanted.push(this.row(call));
    }
    this.list.classList.toggle("is-long", this.calls.size > LONG_FROM);
    this.arrange(wanted);
    this.more.hidden = hidden === 0;
    setText(this.more, `Show ${several(Math.min(hidden, MOST_ROWS), "more call")}`);
  }

  /** Show one call that has changed. */
  one(call) {
    this.count();
    const known = this.rows.has(call.id);
    const row = this.row(call);
    this.list.classList.toggle("is-long", this.calls.size > LONG_FROM);
    if (!known && this.fits(call) && this.list.childElementCount < this.most) this.list.append(row);
    else if (known && !this.fits(call)) row.remove();
  }

  /** Open the row of a call and go there. */
  reveal(callId) {
    const row = this.rows.get(callId)?.node;
    if (!row?.isConnected) return false;
    row.firstChild.open = true;
    row.scrollIntoView({ block: "center" });
    row.querySelector("summary").focus({ preventScroll: true });
    return true;
  }

  row(call) {
    let row = this.rows.get(call.id);
    if (!row) {
      row = new CallRow(call, this.span, this.onContinue);
      this.rows.set(call.id, row);
    } else row.update(call);
    return row.node;
  }

  arrange(wanted) {
    const same = wanted.length === this.list.childElementCount && wanted.every((node, at) => this.list.children[at] === node);
    if (!same) this.list.replaceChildren(...wanted);
  }

  fits(call) {
    const { text, state } = this.filter;
    if (state === "failed" && toneOf(call.state) !== "bad") return false;
    if (state === "open" && !["wait", "busy"].includes(toneOf(call.state))) return false;
    return !text || call.method.toLowerCase().includes(text);
  }

  count() {
    const calls = [...this.calls.values()];
    const failed = calls.filter((call) => toneOf(call.state) === "bad").length;
    const open = calls.filter((call) => ["wait", "busy"].includes(toneOf(call.state))).length;
    const words = [several(calls.length, "call"), failed ? `${failed} failed` : null, open ? `${open} open` : null].filter(Boolean).join(" · ");
    if (!this.title) {
      this.title = el("h3", {});
      this.head.append(this.title);
    }
    setText(this.title, words);
    if (!this.tools && calls.length > FILTER_FROM) {
      this.tools = this.filters();
      this.head.append(this.tools);
    }
  }

  filters() {
    const search = el("input", { type: "search", placeholder: "Filter by method", aria: { label: "Filter calls by method" }, on: { input: () => { this.filter.text = search.value.toLowerCase(); this.update(this.calls); } } });
    const states = [["all", "All"], ["failed", "Failed"], ["open", "Open"]];
    const buttons = states.map(([key, name]) => el("button", { type: "button", aria: { pressed: String(key === "all") }, on: { click: () => {
      this.filter.state = key;
      buttons.forEach((one, at) => one.setAttribute("aria-pressed", String(states[at][0] === key)));
      this.update(this.calls);
    } } }, name));
    return el("div.calls-tools", {}, search, el("div.segments", { role: "group", aria: { label: "Calls shown" } }, buttons));
  }
}

class CallRow {
  constructor(call, span, onContinue) {
    Object.assign(this, { span, onContinue });
    this.method = el("span.call-method");
    this.text = el("span.call-text");
    this.lasted = el("span.call-time");
    this.dot = el("span.call-dot");
    this.state = el("span.hidden-text");
    this.bar = el("span.call-bar-fill");
    this.body = el("div.call-body");
    const fold = el("details.call", {}, el("summary", {}, this.dot, this.state, this.method, this.text,
      el("span.call-bar", { aria: { hidden: true } }, this.bar), this.lasted), this.body);
    fold.addEventListener("toggle", () => { if (fold.open) this.fill(); });
    this.fold = fold;
    this.node = el("li", { data: { call: call.id } }, fold);
    this.update(call);
  }

  update(call) {
    const stamp = `${call.state}|${call.finished_at}|${call.worker}|${call.progress?.percent}|${call.progress?.message}|${call.started_at}|${call.approval_id}`;
    this.call = call;
    this.place();
    if (stamp === this.stamp) return;
    this.stamp = stamp;
    this.fold.dataset.tone = toneOf(call.state);
    const [module, name] = split(call.method);
    fill(this.method, module ? el("span.call-module", {}, module) : null, name);
    setText(this.state, `${wordOf(call.state)}: `);
    setText(this.text, summaryOf(call));
    setText(this.lasted, call.state === "awaiting" ? (call.approval_id ? "needs approval" : "waits") : call.duration_ms === null ? wordOf(call.state).toLowerCase() : duration(call.duration_ms));
    if (this.fold.open) this.fill();
  }

  /** Put the small bar where the call lies in its round. */
  place() {
    const { start, end } = this.span();
    const from = moment(this.call.requested_at);
    if (from === null || end <= start) return;
    const until = moment(this.call.finished_at) ?? end;
    const left = Math.max(0, Math.min(1, (from - start) / (end - start)));
    const width = Math.max(0.012, Math.min(1 - left, (until - from) / (end - start)));
    this.bar.style.setProperty("left", `${(Math.min(left, 0.988) * 100).toFixed(2)}%`);
    this.bar.style.setProperty("width", `${(width * 100).toFixed(2)}%`);
  }

  fill() {
    const { call } = this;
    fill(this.body,
      factRow(factsOf(call)),
      call.progress ? el("p.quiet-text", {}, `${call.progress.percent} % · ${call.progress.message}`) : null,
      call.error ? part("Error", textView(call.error.text === call.error.code ? call.error.code : `${call.error.code}: ${call.error.text}`, "Error")) : null,
      call.arguments_bytes ? part("Arguments", notKept(call.arguments_bytes)) : call.arguments === null ? null : part("Arguments", argumentView(call.arguments)),
      call.value_bytes ? part("Result", notKept(call.value_bytes)) : call.value === null ? null : part("Result", valueView(call.value, "Result")),
      call.approval_id ? el("a.button", { href: href("/approvals", call.approval_id) }, icon("approvals"), call.state === "awaiting" ? "Decide" : "See the decision") : null,
      button("Continue from here…", acting(() => this.onContinue(this.call)), { kind: "small", image: "refresh" }));
  }
}

function factsOf(call) {
  const from = moment(call.requested_at);
  const start = moment(call.started_at);
  const end = moment(call.finished_at);
  return [
    badge(call.state),
    el("span.mono", {}, call.method),
    call.type === "tool" ? null : el("span.tag", {}, call.type.replace("_", " ")),
    call.worker ? ["Worker", call.worker] : call.lane ? ["Lane", call.lane] : null,
    call.line ? ["Line", String(call.line)] : null,
    start !== null && from !== null ? ["Waited", duration(start - from)] : null,
    start !== null && end !== null ? ["Ran", duration(end - start)] : null,
    call.round_attempt > 1 ? ["Attempt of the round", String(call.round_attempt)] : null,
    call.attempts > 1 ? ["Attempts", String(call.attempts)] : null,
    from === null ? null : ["Sent", time(call.requested_at)],
    call.follow_up ? "Its result started the next round" : null,
  ];
}

function argumentView(value) {
  const isPair = Array.isArray(value) && value.length === 2 && Array.isArray(value[0]);
  if (!isPair) return valueView(value, "Arguments");
  const shown = [...value[0].map((one, at) => [String(at + 1), one]), ...Object.entries(value[1] ?? {})];
  if (!shown.length) return el("p.quiet-text", {}, "None.");
  return el("dl.pairs.arguments", {}, shown.map(([name, one]) => el("div", {}, el("dt.mono", {}, name),
    el("dd", {}, isShort(one) ? el("code", {}, inline(one, 200)) : valueView(one, `Argument ${name}`)))));
}

const isShort = (value) => value === null || typeof value !== "object" && String(value).length < 200;

function part(title, content) {
  return el("div.call-part", {}, el("h4", {}, title), content);
}

/** What a row says about a call besides its method: arguments, and the result or error. */
function summaryOf(call) {
  const given = call.arguments_bytes ? bytes(call.arguments_bytes) : inlineArguments(call.arguments, 90);
  if (call.progress) return `(${given}) ${call.progress.percent} % ${call.progress.message}`;
  if (call.error) return `(${given}) ${call.error.code}${call.error.text && call.error.text !== call.error.code ? `: ${call.error.text}` : ""}`.slice(0, 200);
  if (call.value_bytes) return `(${given}) → ${bytes(call.value_bytes)}`;
  return call.value === null || call.value === undefined ? `(${given})` : `(${given}) → ${inline(call.value, 60)}`;
}

function split(method) {
  const at = method.lastIndexOf(".");
  return at < 0 ? ["", method] : [method.slice(0, at + 1), method.slice(at + 1)];
}
