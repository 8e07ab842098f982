/** The words that the agent writes now, as a message that grows until it is there or is withdrawn. */

import { el, fill } from "../../lib/dom.js";
import { markdownView } from "../../lib/markdown/view.js";
import { textOf } from "../../lib/messages.js";

/** Longer words are plain text until they are there, because each piece shows them anew. */
const MOST_CHARS = 16_000;

export class LiveWords {
  constructor() {
    Object.assign(this, { round: null, text: "", settled: new Set() });
    this.body = el("div.message-body");
    this.node = el("div.talk-entry", { hidden: true }, el("article.message.from-agent.is-live", { aria: { label: "The agent writes", busy: "true" } },
      el("header", {}, el("span.message-name", {}, "Agent"), el("span.quiet-text", {}, "writes…")), this.body));
  }

  /** Take an event; returns whether the words have changed. */
  take({ type, round_id: round, data }) {
    if (type === "message.delta") return this.add(round, data);
    // The first start of a round may be heard after its first words: live events are faster.
    if (type === "round.started") return data.attempt > 1 && this.end(round, false);
    if (type === "message.withdrawn" || (type === "round.ended" && data.state !== "done")) return this.end(round, true);
    return false;
  }

  /** Take a piece; what was missed before it comes again from the beginning. */
  add(round, { offset, text }) {
    if (this.settled.has(round) || (this.round !== null && this.round !== round) || offset > this.text.length) return false;
    const known = this.text.slice(offset, offset + text.length);
    if (!text.startsWith(known) || known.length === text.length) return false;
    this.round = round;
    this.text += text.slice(known.length);
    fill(this.body, this.text.length > MOST_CHARS ? textOf(this.text) : markdownView(this.text));
    this.node.hidden = false;
    return true;
  }

  /** End the words of a round: the message, if there is one, is in the list. */
  end(round, isOver) {
    if (isOver) this.settled.add(round);
    if (round !== this.round) return false;
    Object.assign(this, { round: null, text: "" });
    this.node.hidden = true;
    return true;
  }
}
