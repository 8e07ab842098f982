/** Run a turn again in a new chat, with the history that it had. */

import { path, post } from "../../lib/api.js";
import { el } from "../../lib/dom.js";
import { go, href } from "../../lib/router.js";
import { ask, field, say } from "../../lib/widgets.js";

export async function runAgain({ turn }) {
  const chat = el("input", { autocomplete: "off", placeholder: `${turn.chat_key}-replay-…` });
  const answer = await ask({
    title: "Run again in a new chat",
    content: [
      el("p", {}, "The new chat gets the messages and files up to the one that caused this turn. Methods run as always, also those with effects elsewhere."),
      field("Key of the new chat", chat, { optional: true }),
    ],
    confirm: "Run",
    read: () => post(`${path("/turns", turn.id)}/replay`, { chat_key: chat.value.trim() || null }),
  });
  if (!answer) return;
  if (answer.turn_id) go(href("/turns", answer.turn_id));
  else say("The message started no turn.", "bad");
}
