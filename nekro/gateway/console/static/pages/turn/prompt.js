/** What a round sent to the model, where the operator keeps that and the key may see it. */

import { get, path } from "../../lib/api.js";
import { el, fill } from "../../lib/dom.js";
import { count } from "../../lib/format.js";
import { session } from "../../lib/session.js";
import { textView } from "../../lib/values.js";
import { failed, fold, loading } from "../../lib/widgets.js";

/** Fill the place with a disclosure that reads the prompt when it is opened. */
export async function showPrompt(place, round) {
  const { scopes } = await session();
  if (!scopes.includes("admin") || place.hasChildNodes()) return;
  const size = round.prompt_chars === null ? "" : ` (${count(round.prompt_chars)} characters)`;
  fill(place, fold(`What was sent to the model${size}`, () => {
    const body = el("div.prompt", {}, loading(2));
    read(body, round);
    return body;
  }, { data: { part: "prompt" } }));
}

async function read(body, round) {
  try {
    const turn = await get(path("/turns", round.turn_id), { prompts: true, values: false });
    const prompt = turn.rounds.find((one) => one.id === round.id)?.prompt;
    if (!prompt) fill(body, el("p.quiet-text", {}, "It is no longer kept."));
    else fill(body, el("p.quiet-text", {}, "Secrets of the settings are left out. Long texts are cut."), prompt.map(messageOf));
  } catch (error) {
    fill(body, failed(error, () => { fill(body, loading(2)); read(body, round); }));
  }
}

function messageOf({ role, parts }) {
  return el("div.prompt-message", {}, el("h3", {}, role), parts.map((part) =>
    part.type === "text" ? textView(String(part.content ?? ""), `Message of role ${role}`) : el("p.quiet-text.mono", {}, JSON.stringify(part))));
}
