/** A turn: everything that one message, call, timer or job caused, as it happens and afterwards. */

import { get, newest, path, post } from "../lib/api.js";
import { el, fill, setText } from "../lib/dom.js";
import { between, cost, count, duration, several, short, waitText, when } from "../lib/format.js";
import { messageView, withoutCode } from "../lib/messages.js";
import { href } from "../lib/router.js";
import { markSeen } from "../lib/seen.js";
import { badge } from "../lib/states.js";
import { followChat } from "../lib/stream.js";
import { acting, ask, button, factRow, loading, localClock, say } from "../lib/widgets.js";
import { jobRow } from "./jobs.js";
import { waitCard } from "./talk/wait_card.js";
import { continueFrom, runAgain } from "./turn/again.js";
import { TurnModel } from "./turn/model.js";
import { RoundView } from "./turn/round.js";
import { traceLink } from "./turn/trace.js";
import { Waterfall } from "./turn/waterfall.js";

export const title = "Turn";

/** The tree is read again at most this often while events come. */
const RELOAD_MILLISECONDS = 700;

export async function show(place, { params, signal, setTitle }) {
  const page = new TurnPage(place, params.turn, signal, setTitle);
  await page.start();
}

class TurnPage {
  constructor(place, id, signal, setTitle) {
    Object.assign(this, { place, id, signal, setTitle });
    this.rounds = new Map();
    this.early = [];
    this.timer = null;
    this.isDrawing = false;
    this.dirty = new Set();
    this.reload = newest(() => this.read(), (tree) => { this.model.load(tree); this.draw(); }, signal);
  }

  async start() {
    fill(this.place, loading(5));
    const tree = await this.read();
    this.build(tree);
    markSeen(tree.chat_key, this.signal);
    if (!this.model.isOpen) return;
    // The stream begins before the tree is read, so that nothing falls between them.
    const begun = new Promise((resolve) => {
      followChat(tree.chat_key, { signal: this.signal, onEvent: ({ data }) => this.take(data), onState: (state, error) => { this.state(state, error); if (state !== "connecting") resolve(); } });
    });
    await begun;
    if (this.signal.aborted) return;
    await this.reload();
    this.isReady = true;
    for (const event of this.early.splice(0)) this.take(event);
    localClock(0.5, () => { if (!this.model.isEnded) this.tickTock(); }, this.signal);
  }

  read() {
    return get(path("/turns", this.id), {}, this.signal);
  }

  build(tree) {
    this.model = new TurnModel(tree);
    this.head = el("div.page-head");
    this.live = el("p.live-state", { role: "status" });
    this.people = el("div.turn-people");
    this.waterfall = new Waterfall((callId) => this.reveal(callId));
    this.story = el("div.story");
    this.jobs = el("section.card", { hidden: true, aria: { label: "Jobs" } });
    this.waits = el("div.talk-approvals");
    this.end = el("div");
    this.heading = el("h1", { tabindex: "-1" });
    this.status = el("span.turn-status", { role: "status" });
    this.facts = el("div");
    this.actions = el("div.actions");
    this.chat = el("a", { href: href("/chats", tree.chat_key), title: tree.chat_key }, tree.chat_key);
    this.nameChat(tree.chat_key);
    this.head.append(el("nav.crumbs", { aria: { label: "Breadcrumb" } }, el("a", { href: href("/chats") }, "Chats"), this.chat),
      el("div.page-title", {}, this.heading, this.actions), el("div.row", {}, this.status, this.facts), this.live);
    fill(this.place, this.head, this.people, this.waterfall.node, this.story, this.waits, this.jobs, this.end);
    this.draw();
  }

  /** Show the title of the chat in place of its key; a key that may not read it sees the key. */
  async nameChat(chatKey) {
    const chat = await get(path("/chats", chatKey), {}, this.signal).catch(() => null);
    if (chat?.title) setText(this.chat, short(chat.title, 60));
  }

  take(event) {
    if (!this.isReady) return void this.early.push(event);
    if (event.type === "events.lost") return this.schedule(0);
    const change = this.model.apply(event);
    if (!change) return;
    if (change.call && this.rounds.has(change.round)) this.dirty.add(change.call);
    else if (change.round) this.dirty.add(change.round);
    if (change.turn) this.dirty.add("turn");
    if (change.job) this.dirty.add("jobs");
    if (change.reload) this.schedule(change.reload === "now" ? 50 : RELOAD_MILLISECONDS);
    this.plan();
  }

  /** Draw once per frame, however many events came. */
  plan() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      if (!this.signal.aborted) this.drawDirty();
    });
  }

  drawDirty() {
    const dirty = this.dirty;
    this.dirty = new Set();
    for (const round of this.model.rounds.values()) {
      const view = this.rounds.get(round.id);
      if (!view || dirty.has(round.id)) this.drawRound(round);
      else for (const call of round.calls.values()) if (dirty.has(call.id)) view.call(call);
    }
    if (dirty.has("turn")) this.drawHead();
    if (dirty.has("jobs")) this.drawJobs();
    this.facing();
    this.waterfall.update(this.model);
  }

  draw() {
    this.drawHead();
    this.drawPeople();
    for (const round of this.model.rounds.values()) this.drawRound(round);
    this.drawJobs();
    this.drawEnd();
    this.waterfall.update(this.model);
  }

  drawRound(round) {
    let view = this.rounds.get(round.id);
    if (!view) {
      view = new RoundView(round, (call) => continueFrom(this.model, call));
      this.rounds.set(round.id, view);
      this.story.append(view.node);
    }
    view.update(round, this.model.live.get(round.id), this.model.messages.filter((one) => one.round_id === round.id), this.model.rounds.get(round.cause.id));
  }

  drawHead() {
    const { turn } = this.model;
    const asked = this.model.messages.find((one) => one.id === turn.cause.id) ?? this.model.messages.find((one) => one.kind === "user");
    const name = asked ? short(asked.text.split("```", 1)[0], 110) || short(withoutCode(asked.text), 110) || "A message without text" : nameOf(turn);
    setText(this.heading, name);
    this.setTitle(short(name, 40));
    const state = turn.waits_for?.length ? "awaiting" : turn.state;
    if (this.shownState !== state) {
      this.shownState = state;
      fill(this.status, badge(state));
      fill(this.actions, this.buttons(turn));
    }
    this.drawWaits(turn);
    this.facing();
  }

  drawWaits({ waits = [], chat_key: chatKey }) {
    const key = waits.map((wait) => wait.call_id).join();
    if (key === this.waitsKey) return;
    this.waitsKey = key;
    fill(this.waits, waits.map((wait) => waitCard(wait, { chatKey, onAnswered: () => this.schedule(0) })));
  }

  /** The facts below the title; they change while the turn runs. */
  facing() {
    const { turn } = this.model;
    const calls = this.model.calls();
    const failed = calls.filter((call) => ["failed", "unknown"].includes(call.state)).length;
    const tokens = this.model.sum("prompt_tokens");
    fill(this.facts, factRow([
      when(turn.requested_at),
      duration(between(turn.requested_at, turn.finished_at)),
      ...(turn.waits ?? []).map(waitText),
      several(this.model.rounds.size, "round"),
      calls.length ? `${several(calls.length, "call")}${failed ? ` (${failed} failed)` : ""}` : null,
      tokens === null ? null : `${count(tokens)} tokens in, ${count(this.model.sum("completion_tokens"))} out${[...this.model.rounds.values()].some((round) => round.tokens_estimated) ? " (estimated)" : ""}`,
      this.model.sum("cost") ? `cost ${cost(this.model.sum("cost"))}` : null,
      turn.cause.turn_id && turn.cause.turn_id !== turn.id ? el("a", { href: href("/turns", turn.cause.turn_id) }, "The turn before") : null,
      traceLink(turn),
    ]));
  }

  buttons(turn) {
    return [
      this.model.isEnded ? null : button("Cancel", acting(() => this.cancel()), { kind: "danger" }),
      button("Run again…", acting(() => runAgain(this.model)), { image: "refresh" }),
      el("a.button", { href: href("/chats", turn.chat_key) }, "Open chat"),
    ];
  }

  drawPeople() {
    const outside = this.model.messages.filter((one) => !one.round_id || !this.model.rounds.has(one.round_id));
    const key = outside.map((one) => one.id).join();
    if (key === this.peopleKey) return;
    this.peopleKey = key;
    fill(this.people, outside.map((message) => messageView(message)));
  }

  drawJobs() {
    const jobs = this.model.ownJobs();
    this.jobs.hidden = jobs.length === 0;
    if (jobs.length) fill(this.jobs, el("h2", {}, "Jobs"), el("ul.job-list", { role: "list" }, jobs.map((job) => el("li", {}, jobRow(job, () => this.schedule(0))))));
  }

  drawEnd() {
    const { turn } = this.model;
    fill(this.end,
      turn.error && ![...this.model.rounds.values()].some((round) => round.error?.text === turn.error.text) ? el("div.banner", { data: { tone: "bad" } }, `${turn.error.code}: ${turn.error.text}`) : null,
      turn.merged_into ? el("p", {}, "This turn was answered by ", el("a", { href: href("/turns", turn.merged_into) }, "another one"), ".") : null,
      turn.following?.length ? el("p", {}, "It went on in ", turn.following.map((id, at) => [at ? ", " : "", el("a", { href: href("/turns", id) }, turn.following.length === 1 ? "another turn" : `turn ${at + 1}`)]), ".") : null,
      el("p.quiet-text.turn-id", {}, "Turn ", el("span.mono", {}, turn.id)));
  }

  tickTock() {
    this.facing();
    this.waterfall.update(this.model);
  }

  state(state) {
    const words = { connecting: "", live: "", waiting: "The connection is lost; trying again…", refused: "Live updates were refused; reload the page." };
    setText(this.live, words[state] ?? "");
  }

  schedule(milliseconds) {
    if (this.timer !== null && milliseconds >= RELOAD_MILLISECONDS) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = null;
      this.reload().catch((error) => { if (error.name !== "AbortError") this.schedule(5 * RELOAD_MILLISECONDS); });
    }, milliseconds);
    this.signal.addEventListener("abort", () => clearTimeout(this.timer), { once: true });
  }

  reveal(callId) {
    for (const view of this.rounds.values()) if (view.calls.reveal(callId)) return;
  }

  async cancel() {
    const sure = await ask({ title: "Cancel this turn?", content: el("p", {}, "Code that runs is stopped. Messages that were sent stay."), confirm: "Cancel the turn", danger: true });
    if (!sure) return;
    await post(`${path("/turns", this.id)}/cancel`);
    say("The turn is being cancelled.");
    this.schedule(50);
  }
}

function nameOf(turn) {
  return { timer: "Started by a timer", job: "Started by a job", call: "Started by a call", manual: "Started by an operator" }[turn.cause.kind] ?? "Turn";
}
