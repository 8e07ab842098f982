/** One round of a turn: why it began, the request to the model, its code, output and calls. */

import { el, fill, setText } from "../../lib/dom.js";
import { between, cost, count, duration, moment, short } from "../../lib/format.js";
import { icon } from "../../lib/icons.js";
import { messageView, textOf, withoutCode } from "../../lib/messages.js";
import { codeView } from "../../lib/python.js";
import { badge } from "../../lib/states.js";
import { textView } from "../../lib/values.js";
import { copyButton, fold } from "../../lib/widgets.js";
import { CallList } from "./calls.js";
import { showPrompt } from "./prompt.js";

const STOPS = {
  NORMAL: null,
  AGENT: "A call gave the agent something to think about, so the code ended here.",
  ERROR: "The code ended with an error.",
  WAITING: "The code waits in its last call, without running, and goes on there in another turn.",
  TIMEOUT: "The code ran too long and was stopped.",
};

export class RoundView {
  /** @param {function(object)} onContinue goes on from a call in a new chat */
  constructor(round, onContinue) {
    this.id = round.id;
    this.round = round;
    this.head = el("header.round-head");
    this.cause = el("p.round-cause", { hidden: true });
    this.prompt = el("div");
    this.thought = el("div");
    this.codePlace = el("div.code-place");
    this.output = el("div.output-place");
    this.fault = el("div");
    this.messages = el("div.round-messages");
    this.calls = new CallList(() => this.span(), onContinue);
    this.calls.node.hidden = true;
    this.sampled = el("p.quiet-text", { hidden: true }, "Calls of tools are kept for a share of the turns. Those of this round are listed when it has ended, without arguments and results.");
    this.title = el("h2", { id: `round-${round.id}` });
    this.badge = el("span");
    this.figures = el("ul.facts", { role: "list" });
    this.head.append(el("div.split", {}, this.title, this.badge), this.figures);
    this.node = el("section.card.round", { aria: { labelledby: this.title.id }, data: { round: round.id } },
      this.head, this.cause, this.prompt, this.thought, this.codePlace, this.output, this.calls.node, this.sampled, this.messages, this.fault);
  }

  span() {
    const start = moment(this.round.answered_at) ?? moment(this.round.started_at) ?? Date.now();
    return { start, end: Math.max(moment(this.round.finished_at) ?? Date.now(), start + 1) };
  }

  /**
   * @param {Array} messages those that the code of the round sent
   * @param {object|undefined} before the round that caused this one
   */
  update(round, live, messages, before) {
    this.round = round;
    this.before = before;
    setText(this.title, `Round ${round.number}`);
    fill(this.badge, badge(round.state), round.attempt > 1 ? el("span.tag.attempt", {}, `attempt ${round.attempt}`) : null);
    fill(this.figures, figures(round).map((one) => el("li", {}, one)));
    this.showCause(round);
    if (round.prompt_kept && !this.prompt.hasChildNodes()) showPrompt(this.prompt, round).catch(() => {}); // the page says what fails
    this.showThought(round, live);
    this.showCode(round);
    this.showOutput(round, live);
    this.calls.node.hidden = round.calls.size === 0;
    this.sampled.hidden = round.tool_calls_kept !== false;
    if (round.calls.size) this.calls.update(round.calls);
    this.mark();
    this.showMessages(messages);
    this.showEnd(round);
  }

  /** Show one call that has changed. */
  call(call) {
    this.calls.node.hidden = false;
    this.calls.calls = this.round.calls;
    this.calls.one(call);
    this.mark();
  }

  /** Highlight the lines from which calls are under way. */
  mark() {
    if (!this.code) return;
    const open = [...this.round.calls.values()].filter((call) => this.round.state === "running" && ["queued", "running"].includes(call.state));
    this.code.mark(new Set(open.map((call) => call.line).filter(Boolean)));
  }

  showCause(round) {
    const lines = [["follow", causeOf(round, this.before)], ...attemptsOf(round).map((line) => ["retry", line])].filter(([, text]) => text);
    const key = lines.join();
    if (key === this.causeKey) return;
    this.causeKey = key;
    this.cause.hidden = lines.length === 0;
    fill(this.cause, lines.map(([image, text]) => el("span.cause-line", {}, icon(image), el("span", {}, text))));
  }

  showThought(round, live) {
    const said = round.answer ?? live?.answer ?? "";
    const words = withoutCode(said);
    const key = `${said.length}|${round.code === null}`;
    if (this.thoughtKey === key) return;
    this.thoughtKey = key;
    if (!said) return fill(this.thought, round.state === "running" && round.code === null ? el("p.quiet-text", {}, "Waiting for the model…") : null);
    if (round.code === null && round.state === "running") return fill(this.thought, missedNote(live?.missed.answer), el("pre.text.live", { tabindex: "0", role: "group", aria: { label: "The model's answer so far" } }, said));
    const whole = said.includes("```") ? fold("Answer of the model in full", () => textView(said, "Answer")) : null;
    fill(this.thought, words ? el("div.thought", {}, textOf(words)) : null, whole);
  }

  showCode(round) {
    if (!round.code || round.code === this.shownCode) return;
    this.shownCode = round.code;
    this.code = codeView(round.code, { label: `Code of round ${round.number}` });
    fill(this.codePlace, el("div.code-frame", {}, this.code.node, copyButton(round.code, "Copy the code")));
  }

  showOutput(round, live) {
    const text = round.output || live?.output || "";
    const isLive = round.state === "running" && !round.output;
    const key = `${text.length}|${isLive}`;
    if (key === this.outputKey) return;
    this.outputKey = key;
    if (!text) return fill(this.output);
    const pre = this.output.querySelector("pre.output.is-live");
    if (isLive && pre) {
      const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 8;
      pre.textContent = text;
      if (atEnd) pre.scrollTop = pre.scrollHeight;
      return;
    }
    fill(this.output, el("h3", {}, isLive ? "Output so far" : "Output"), isLive ? missedNote(live?.missed.output) : null, textView(text, "Output", { kind: isLive ? "pre.text.output.is-live" : "pre.text.output" }));
  }

  showMessages(messages) {
    const key = messages.map((one) => one.id).join();
    if (key === this.messageKey) return;
    this.messageKey = key;
    const old = new Map([...this.messages.children].map((node) => [node.dataset.message, node]));
    fill(this.messages, messages.map((message) => old.get(message.id) ?? messageView(message, { level: 3 })));
  }

  showEnd(round) {
    const stop = round.stop_type && round.stop_type in STOPS ? STOPS[round.stop_type] : round.stop_type && `The code ended: ${round.stop_type.toLowerCase().replaceAll("_", " ")}.`;
    const key = `${stop}|${round.error?.text}|${round.merged_into}`;
    if (key === this.endKey) return;
    this.endKey = key;
    fill(this.fault,
      round.error ? el("div.banner", { data: { tone: "bad" } }, el("span", {}, round.error.text)) : null,
      round.merged_into ? el("p.quiet-text", {}, "It was answered together with a later message.") : null,
      stop && round.stop_type !== "AGENT" ? el("p.quiet-text", {}, stop) : null);
  }
}

function figures(round) {
  const took = between(round.started_at, round.finished_at);
  const model = round.answered_at ? moment(round.answered_at) - moment(round.started_at) : null;
  return [
    round.model,
    round.prompt_tokens === null ? null : `${count(round.prompt_tokens)} tokens in, ${count(round.completion_tokens)} out${round.tokens_estimated ? " (estimated)" : ""}`,
    round.cost ? `cost ${cost(round.cost)}` : null,
    (round.model_tries ?? round.tries) > 1 ? `${round.model_tries ?? round.tries} requests` : null,
    round.failed_groups?.length ? `fallback after ${round.failed_groups.map((one) => one.model).join(", ")}` : null,
    model === null ? null : `model ${duration(model)}`,
    took === null ? null : `${duration(took)} in all`,
    round.worker ? `on ${round.worker}` : null,
  ].filter(Boolean);
}

const CAUSES = { timer: "Started by a timer.", job: "Follow-up: a job has ended.", manual: "Started by an operator.", message: "A further message came." };

function causeOf(round, before) {
  if (round.number === 1 && round.cause.kind === "message") return null;
  if (round.cause.kind === "call") return round.observation ? `Follow-up: a call came back with “${short(round.observation, 300)}”` : "Follow-up: a call came back with a result for the agent.";
  if (round.cause.kind !== "round") return CAUSES[round.cause.kind] ?? `Started by ${round.cause.kind}.`;
  if (before?.stop_type === "ERROR" && !isInterrupted(before)) return "Follow-up: the code of the round before ended with an error.";
  return isInterrupted(before) ? "Continued after a crash: the worker of the round before stopped, and its code was not run again." : "Follow-up of the round before.";
}

/** Whether a round's worker stopped while its code may have run: a program that ends by itself has an exit code. */
function isInterrupted(round) {
  return round?.stop_type === "ERROR" && round.exit_code === null;
}

/** What became of the attempts before the present one. */
function attemptsOf(round) {
  const all = round.attempts ?? [];
  const known = all.filter((one) => one.number < round.attempt);
  if (!known.length && round.attempt > 1) return [`Attempt ${round.attempt}: the worker of the attempt before stopped, so ${round.worker ?? "another worker"} took over.`];
  return known.map((one) => {
    const next = all.find((other) => other.number === one.number + 1);
    const worker = next?.worker ?? (round.attempt === one.number + 1 ? round.worker : null) ?? "another worker";
    const then = next?.is_resumed ? "ran its program again" : "began again";
    return `Attempt ${one.number} on ${one.worker ?? "a worker"} was lost after ${duration(moment(one.last_event_at ?? one.ended_at) - moment(one.started_at))}; ${worker} ${then}.`;
  });
}

/** Says that a live text lacks its beginning, which follows when it is complete. */
function missedNote(chars) {
  return chars ? el("p.quiet-text", {}, `The first ${chars} characters were written before this page was opened. They appear when the text is complete.`) : null;
}
