/** Run a turn again in a new chat, with the history that it had: as a whole, or from one of its calls. */

import { path, post } from "../../lib/api.js";
import { el } from "../../lib/dom.js";
import { go, href } from "../../lib/router.js";
import { ask, field, say } from "../../lib/widgets.js";

export function runAgain({ turn }) {
  return inNewChat(turn, null, {
    title: "Run again in a new chat",
    text: "The new chat gets the messages and files up to the one that caused this turn. Methods run as always, also those with effects elsewhere.",
    confirm: "Run",
  });
}

export function continueFrom({ turn }, call) {
  return inNewChat(turn, call.id, {
    title: "Continue from here in a new chat",
    text: `The new chat gets the messages up to this call, and the code runs again: calls before ${call.method.split(".").at(-1)} are answered as they were, without an effect. This one and those after it are made, also those with effects elsewhere.`,
    confirm: "Continue",
  });
}

async function inNewChat(turn, callId, { title, text, confirm }) {
  const chat = el("input", { autocomplete: "off", placeholder: callId ? `${turn.chat_key}-from-…` : `${turn.chat_key}-replay-…` });
  const answer = await ask({
    title,
    content: [el("p", {}, text), field("Key of the new chat", chat, { optional: true })],
    confirm,
    read: () => post(`${path("/turns", turn.id)}/replay`, { chat_key: chat.value.trim() || null, call_id: callId }),
  });
  if (!answer) return;
  if (answer.turn_id) go(href("/turns", answer.turn_id));
  else say("The message started no turn.", "bad");
}
