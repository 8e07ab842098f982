/** A chat, as the person sees it: messages with files and pictures, what the agent does now, approvals. */

import { get, patch, path, post } from "../lib/api.js";
import { el, fill, setText } from "../lib/dom.js";
import { href } from "../lib/router.js";
import { messageView } from "../lib/messages.js";
import { markSeen } from "../lib/seen.js";
import { followChat } from "../lib/stream.js";
import { acting, ask, button, failed, field, loading, pageHead, say } from "../lib/widgets.js";
import { Activity } from "./talk/activity.js";
import { composer } from "./talk/composer.js";
import { LiveWords } from "./talk/live_words.js";

export const title = "Chat";
const PAGE = 50;
const REFRESH_MILLISECONDS = 150;

export async function show(place, { params, signal, setTitle }) {
  setTitle(params.chat);
  await new TalkPage(place, params.chat, { signal, setTitle }).start();
}

class TalkPage {
  constructor(place, chatKey, { signal, setTitle }) {
    Object.assign(this, { place, chatKey, signal, setTitle });
    this.chat = null;
    this.heading = el("h1", { tabindex: "-1" }, chatKey);
    this.key = el("p.quiet-text.mono", { hidden: true }, chatKey);
    this.known = new Map();
    this.cursor = null;
    this.timer = null;
    this.log = el("div.talk-log", { role: "log", tabindex: "0", aria: { label: "Messages" } });
    this.older = button("Show earlier messages", acting(() => this.showOlder()), { hidden: true, kind: "wide" });
    this.state = el("p.live-state", { role: "status" });
    this.activity = new Activity(chatKey, signal, (posted) => this.posted(posted));
    this.words = new LiveWords();
    this.none = el("p.quiet-text.talk-none", { hidden: true }, "No messages yet. Write the first one below.");
  }

  async start() {
    const actions = [
      button("Rename", acting(() => this.rename())),
      button("Stop", acting(() => this.stop()), { label: "Stop what the agent does" }),
      button("New conversation", acting(() => this.reset())),
    ];
    const head = pageHead({ title: this.heading, crumbs: [["Chats", href("/chats")]], actions });
    head.append(this.key);
    fill(this.place, el("div.talk", {}, head, this.state,
      el("div.talk-scroll", {}, this.older, this.none, this.log, this.words.node, this.activity.node),
      composer(this.chatKey, { onPosted: (posted) => this.posted(posted) })));
    const mark = loading(3);
    fill(this.log, mark);
    const begun = new Promise((resolve) => {
      followChat(this.chatKey, { signal: this.signal, onEvent: ({ data }) => this.take(data), onState: (state, error) => { this.connection(state, error); if (state !== "connecting") resolve(); } });
    });
    await begun;
    try {
      await Promise.all([this.refresh(), this.activity.load(), this.readTitle()]);
      mark.remove();
    } catch (error) {
      mark.replaceWith(error.status === 404 ? "" : failed(error));
    }
    this.none.hidden = this.known.size > 0;
    markSeen(this.chatKey, this.signal);
    this.toEnd();
  }

  take(event) {
    if (event.type === "message.delta") return this.grow(event);
    this.words.take(event);
    if (event.type.startsWith("message.") || event.type === "file.sent" || event.type === "events.lost") this.plan();
    if (event.type === "turn.ended" && event.data.state === "failed") markSeen(this.chatKey, this.signal);
    this.activity.take(event);
  }

  grow(event) {
    const isAtEnd = this.isAtEnd();
    if (this.words.take(event) && isAtEnd) this.toEnd();
  }

  /** Read new messages soon; many events cause one reading. */
  plan() {
    if (this.timer !== null) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.refresh().catch((error) => { if (error.name !== "AbortError") this.plan(); });
    }, REFRESH_MILLISECONDS);
  }

  async refresh() {
    const page = await get(`${path("/chats", this.chatKey)}/messages`, { limit: PAGE }, this.signal);
    if (this.signal.aborted) return;
    const isAtEnd = this.isAtEnd();
    if (this.cursor === null && !this.known.size) this.cursorFrom(page);
    for (const message of [...page.items].sort((one, other) => one.sequence - other.sequence)) this.add(message);
    for (const message of page.items) if (message.kind === "assistant") this.words.end(message.round_id, true);
    this.none.hidden = this.known.size > 0;
    if (isAtEnd) this.toEnd();
    // The first message of a person gives the chat its title.
    if (this.chat !== null && !this.chat.title && page.items.some((one) => one.kind === "user")) await this.readTitle();
  }

  /** Show the title of the chat, with its key below; a chat that has none yet is known by its key. */
  async readTitle() {
    this.chat = await get(path("/chats", this.chatKey), {}, this.signal).catch((error) => {
      if (error.status === 404) return { title: null };
      throw error;
    });
    setText(this.heading, this.chat.title ?? this.chatKey);
    this.setTitle(this.chat.title ?? this.chatKey);
    this.key.hidden = !this.chat.title;
  }

  async rename() {
    const title = el("input", { value: this.chat?.title ?? "", maxlength: "200", autocomplete: "off" });
    const given = await ask({ title: "Rename the chat", content: field("Title", title, { hint: "Without one, the chat has the name of its platform, or the first words of a person.", optional: true }), confirm: "Rename", read: () => ({ title: title.value || null }) });
    if (!given) return;
    await patch(path("/chats", this.chatKey), given);
    await this.readTitle();
  }

  cursorFrom(page) {
    this.cursor = page.next_cursor;
    this.older.hidden = !this.cursor;
  }

  async showOlder() {
    const page = await get(`${path("/chats", this.chatKey)}/messages`, { limit: PAGE, cursor: this.cursor }, this.signal);
    this.cursorFrom(page);
    for (const message of page.items) this.add(message);
  }

  /** Put a message at its place in the order. */
  add(message) {
    if (this.known.has(message.id)) return;
    const node = el("div.talk-entry", { data: { sequence: message.sequence } }, messageView(message),
      message.turn_id && message.kind === "assistant" ? el("a.talk-how", { href: href("/turns", message.turn_id), aria: { label: "How this answer came about" } }, "How?") : null,
      message.turn_id && message.kind === "user" ? el("a.talk-how", { href: href("/turns", message.turn_id) }, "Turn") : null);
    this.known.set(message.id, node);
    const next = [...this.log.children].find((one) => Number(one.dataset.sequence) > message.sequence);
    this.log.insertBefore(node, next ?? null);
  }

  posted(posted) {
    if (posted.message) this.add(posted.message);
    this.none.hidden = true;
    this.toEnd();
    if (!posted.turn_id) say("Sent. It starts no turn.");
  }

  isAtEnd() {
    return window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 120;
  }

  toEnd() {
    window.scrollTo(0, document.documentElement.scrollHeight);
  }

  async stop() {
    const { stopped, cancelled, still_running: running, waits } = await post(`${path("/chats", this.chatKey)}/cancel`);
    say(stopped.length + cancelled.length + running.length + waits.length ? "The agent is stopped." : "The agent was not working.");
  }

  async reset() {
    if (!await ask({ title: "Begin a new conversation?", content: el("p", {}, "The agent forgets the messages so far. They stay recorded."), confirm: "Begin a new one", danger: true })) return;
    await post(`${path("/chats", this.chatKey)}/reset`);
    this.known.clear();
    this.log.replaceChildren();
    this.none.hidden = false;
    await this.refresh();
    say("A new conversation has begun.");
  }

  connection(state, error) {
    const words = { waiting: "The connection is lost; trying again…", refused: error?.message ?? "Live updates were refused." };
    setText(this.state, words[state] ?? "");
  }
}
