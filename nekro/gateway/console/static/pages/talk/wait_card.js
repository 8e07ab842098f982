/** What a program waits for; a question has the controls to answer it. In chats and on pages of turns. */

import { newKey, path, post } from "../../lib/api.js";
import { el } from "../../lib/dom.js";
import { waitText } from "../../lib/format.js";
import { href } from "../../lib/router.js";
import { acting, button, factRow, field, nextId, say, time } from "../../lib/widgets.js";
import { userName } from "./composer.js";

/**
 * @param {object} wait as the API has it
 * @param {object} options chatKey; turnId: linked if it is given; onAnswered(posted)
 */
export function waitCard(wait, { chatKey, turnId = null, onAnswered }) {
  const turn = turnId ? el("a", { href: href("/turns", turnId) }, "The turn") : null;
  if (wait.kind !== "answer") return el("p.card.wait", { data: { wait: wait.call_id } }, `${waitText(wait)} `, turn);
  const title = el("h2", { id: nextId("wait") }, "The agent asks");
  return el("section.card.wait", { aria: { labelledby: title.id }, data: { wait: wait.call_id } }, title,
    el("p.message-text", {}, wait.question),
    factRow([wait.user_id ? `for ${wait.user_id}` : "for everyone of the chat", wait.until ? ["until", time(wait.until)] : null, turn]),
    answerForm(wait, chatKey, onAnswered));
}

/** The answer is a message of the person who was asked: its next one is what the program gets. */
function answerForm(wait, chatKey, onAnswered) {
  /** One per answer, so that one whose request failed is not posted twice. */
  const keys = {};
  const answer = async (given) => {
    keys[given] ??= newKey();
    const posted = await post(`${path("/chats", chatKey)}/messages`, { text: given, user_id: wait.user_id ?? userName() }, { key: keys[given] });
    say("Answered. The program goes on.");
    onAnswered(posted);
  };
  if (wait.choices.length) {
    return el("div.row.decide", { role: "group", aria: { label: "Choices" } },
      wait.choices.map((choice) => button(choice, acting(() => answer(choice)), { data: { key: choice } })));
  }
  const text = el("input", { required: true, autocomplete: "off" });
  const submit = acting(() => answer(text.value));
  return el("form.form", { on: { submit: (event) => { event.preventDefault(); submit(event); } } },
    field("Answer", text), el("div.row", {}, el("button.button.primary", { type: "submit" }, "Answer")));
}
