/** What the agent does now in a chat: the running turn with its calls, jobs, approvals, and what programs wait for. */

import { get, newest, path } from "../../lib/api.js";
import { el, fill, setText } from "../../lib/dom.js";
import { inlineArguments } from "../../lib/values.js";
import { href } from "../../lib/router.js";
import { isOpen } from "../../lib/states.js";
import { meter } from "../../lib/widgets.js";
import { jobRow } from "../jobs.js";
import { approvalById } from "./approval_card.js";
import { waitCard } from "./wait_card.js";

const WORDS = { "turn.started": "The agent has the message", "round.started": "The agent reads", "model.requested": "The model thinks", "code.ready": "The code runs", "program.resumed": "The code runs again" };
/** Open jobs of the chat are read again at most this often. */
const JOBS_MILLISECONDS = 800;

export class Activity {
  /** @param {function(object)} onPosted takes the answer to a question that was posted */
  constructor(chatKey, signal, onPosted) {
    Object.assign(this, { chatKey, signal, onPosted });
    this.turns = new Map();
    this.approvals = new Map();
    this.timer = null;
    this.working = el("div.working", { role: "status", hidden: true });
    this.asked = el("div.talk-approvals");
    this.waits = el("div.talk-approvals");
    this.jobs = el("ul.talk-jobs", { role: "list" });
    this.readWaits = newest(() => get(`${path("/chats", chatKey)}/turns`, { state: "waiting", limit: 50 }, signal), ({ items }) => this.drawWaits(items), signal);
    this.againJobs = newest(() => get("/jobs", { chat_key: chatKey, open: true }, signal), ({ items }) => this.drawJobs(items), signal);
    this.node = el("div.activity", {}, this.working, this.asked, this.waits, this.jobs);
  }

  async load() {
    const [pending] = await Promise.all([
      get("/approvals", { chat_key: this.chatKey, state: "pending" }, this.signal).catch(() => ({ items: [] })),
      this.readJobs(),
      this.readWaits().catch((error) => { if (error.status !== 404) throw error; }),
    ]);
    for (const item of [...pending.items].reverse()) this.showApproval(item.id);
  }

  take(event) {
    const { type, data, turn_id: turn } = event;
    if (type.startsWith("job.")) this.planJobs();
    if (type === "approval.requested") this.showApproval(data.approval_id);
    if (type === "approval.decided") this.hideApproval(data.approval_id);
    if (type === "wait.ended" || (type === "turn.ended" && data.waits?.length)) this.readWaits().catch(() => {});
    if (type === "turn.ended") this.turns.delete(turn);
    else if (turn && (WORDS[type] || type.startsWith("call."))) this.takeStep(turn, event);
    else return;
    this.draw();
  }

  takeStep(id, { type, call_id: callId, data }) {
    // A call that goes on after its turn has ended is shown with the jobs.
    if (!this.turns.has(id) && !WORDS[type]) return;
    if (!this.turns.has(id)) this.turns.set(id, { word: "", calls: new Map() });
    const turn = this.turns.get(id);
    if (WORDS[type]) turn.word = WORDS[type];
    if (type === "call.started") turn.calls.set(callId, { ...data, progress: null });
    if (type === "call.progress" && turn.calls.has(callId)) turn.calls.get(callId).progress = data;
    if (type === "call.ended") turn.calls.delete(callId);
  }

  draw() {
    this.working.hidden = this.turns.size === 0;
    fill(this.working, [...this.turns].map(([id, { word, calls }]) => el("div.working-turn", {},
      el("div.split", {}, el("span.badge", { data: { tone: "busy" } }, calls.size ? "Working" : word), el("a", { href: href("/turns", id) }, "Watch the turn")),
      [...calls.values()].slice(-4).map((call) => el("div.working-call", {}, el("code", {}, `${call.method.split(".").at(-1)}(${inlineArguments(call.arguments, 60)})`),
        call.progress ? [meter(call.progress.percent, `Progress of ${call.method}`), el("span.quiet-text", {}, call.progress.message)] : null)))));
  }

  showApproval(id) {
    if (this.approvals.has(id)) return;
    const card = approvalById(id, { signal: this.signal, isCompact: true, onDecided: () => this.hideApproval(id) });
    this.approvals.set(id, card);
    this.asked.append(card);
  }

  hideApproval(id) {
    this.approvals.get(id)?.remove();
  }

  /** What programs wait for but approvals, which have their own cards. A card that stays keeps what was typed. */
  drawWaits(turns) {
    const known = new Map([...this.waits.children].map((card) => [card.dataset.wait, card]));
    const shown = turns.flatMap((turn) => turn.waits.map((wait) => known.get(wait.call_id) ?? waitCard(wait, { chatKey: this.chatKey, turnId: turn.id, onAnswered: this.onPosted })));
    this.waits.replaceChildren(...shown);
  }

  planJobs() {
    if (this.timer !== null) return;
    this.timer = setTimeout(() => { this.timer = null; this.readJobs(); }, JOBS_MILLISECONDS);
  }

  drawJobs(jobs) {
    fill(this.jobs, jobs.filter((job) => isOpen(job.state)).map((job) => el("li.card", {}, jobRow(job, () => this.readJobs()))));
  }

  async readJobs() {
    try {
      await this.againJobs();
    } catch (error) {
      if (error.name !== "AbortError") setText(this.jobs, ""); // a key without the scope does not see jobs
    }
  }
}
