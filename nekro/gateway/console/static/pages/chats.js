/** All chats: the ones with news first, those whose last turn failed and was not looked at since are marked. */

import { get } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { several, short } from "../lib/format.js";
import { icon } from "../lib/icons.js";
import { lineOfMessage } from "../lib/messages.js";
import { go, href, remember } from "../lib/router.js";
import { failuresSince, unread } from "../lib/seen.js";
import { badge } from "../lib/states.js";
import { ask, button, empty, field, loaded, paged, pageHead, time } from "../lib/widgets.js";

export const title = "Chats";
/** How long typing pauses before the list is searched. */
const TYPING_MILLISECONDS = 250;

export function show(place, { query, signal }) {
  let text = query.get("text") ?? "";
  let failedOnly = query.get("show") === "failed";
  let timer = null;
  const list = el("div");
  const held = {};
  const search = el("input", { type: "search", value: text, placeholder: "Search chats", aria: { label: "Search chats" }, on: { input: () => {
    clearTimeout(timer);
    timer = setTimeout(() => { text = search.value.trim(); remember({ text }); again(); }, TYPING_MILLISECONDS);
  } } });
  const choices = [["all", "All"], ["failed", "New failures"]];
  const buttons = choices.map(([key, name]) => el("button", { type: "button", aria: { pressed: String((key === "failed") === failedOnly) }, on: { click: () => {
    failedOnly = key === "failed";
    remember({ show: failedOnly ? "failed" : null });
    buttons.forEach((one, at) => one.setAttribute("aria-pressed", String((choices[at][0] === "failed") === failedOnly)));
    again();
  } } }, name));
  fill(place, pageHead({ title, actions: [button("New chat", () => newChat(), { kind: "primary" })] }),
    el("div.toolbar", {}, el("div.search", {}, icon("search"), search), el("div.segments", { role: "group", aria: { label: "Chats shown" } }, buttons)), list);
  const again = loaded(list, (how) => paged(
    (cursor) => get("/chats", { q: text, failures_since: failuresSince(), cursor, limit: 50 }, signal),
    (items) => shown(failedOnly ? items.filter(unread) : items),
    { ...how, held, none: text ? empty("Nothing found", `No chat fits “${text}”.`) : empty("No chats yet", "A chat begins with its first message.", button("Begin one", () => newChat())) }), { signal });
  whenChanged(["chats", "turns"], () => again({ quietly: true }), { signal });
}

function shown(chats) {
  return chats.length ? el("ul.list", { role: "list" }, chats.map(chatRow)) : empty("No new failures", "Turns that fail are marked here until you open their chat.");
}

function chatRow(chat) {
  const failures = unread(chat);
  return el("li", {}, el("a.list-link", { href: href("/chats", chat.chat_key), data: { key: chat.chat_key } },
    el("span.list-main", {},
      el("span.list-title", {}, chat.title || chat.chat_key, chat.title ? el("span.quiet-text.mono", {}, ` ${chat.chat_key}`) : null),
      el("span.list-text", {}, chat.last_message ? lastWords(chat.last_message) : "No messages")),
    el("span.list-side", {}, time(chat.active_at),
      failures ? badge("failed", several(failures, "failure")) : chat.open_rounds ? badge("running", "Working") : null)));
}

function lastWords(message) {
  const who = message.kind === "user" ? message.sender_name || "Person" : "Agent";
  return `${who}: ${short(lineOfMessage(message), 140) || "a file"}`;
}

async function newChat() {
  const key = el("input", { required: true, value: `console-${Date.now().toString(36)}`, autocomplete: "off" });
  const made = await ask({ title: "New chat", content: field("Key of the chat", key, { hint: "It begins with your first message." }), confirm: "Open", read: () => key.value.trim() || Promise.reject(new Error("A chat needs a key.")) });
  if (made) go(href("/chats", made));
}
