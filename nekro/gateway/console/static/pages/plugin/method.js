/** A method: what it is, and a form to try it. */

import { post } from "../../lib/api.js";
import { el, fill } from "../../lib/dom.js";
import { duration } from "../../lib/format.js";
import { href } from "../../lib/router.js";
import { argumentForm } from "../../lib/signature.js";
import { badge } from "../../lib/states.js";
import { textView, valueView } from "../../lib/values.js";
import { button, factRow, field, fold } from "../../lib/widgets.js";

const CHAT_KEY = "nekro.try-chat";

export function methodRow(method) {
  const summary = el("span.method-head", {}, el("code.method-name", {}, method.name), el("code.quiet-text", {}, method.signature),
    method.type === "tool" ? null : el("span.tag", {}, method.type.replace("_", " ")), method.requires_approval ? el("span.tag", {}, "needs approval") : null);
  return fold(summary, () => body(method), { class: "method", data: { method: method.task } });
}

function body(method) {
  const form = argumentForm(method.signature);
  const chat = el("input", { required: true, value: chatOf(), autocomplete: "off" });
  const answer = el("div", { role: "status" });
  const run = button("Try it", null, { kind: "primary", type: "submit" });
  const submit = async (event) => {
    event.preventDefault();
    run.disabled = true;
    fill(answer, el("p.quiet-text", {}, "Running…"));
    try {
      rememberChat(chat.value);
      const call = await post("/calls", { method: method.task, chat_key: chat.value, ...form.read() });
      fill(answer, resultOf(call));
    } catch (error) {
      fill(answer, el("div.banner", { data: { tone: "bad" } }, error.message));
    } finally {
      run.disabled = false;
    }
  };
  return el("form.form", { on: { submit } },
    method.doc ? el("p.doc", {}, dedented(method.doc)) : null,
    factRow([["Lane", method.lane], method.lane_reason ? method.lane_reason : null, ["Task", el("span.mono", {}, method.task)]]),
    form.node, field("Chat", chat, { hint: "The call is made in this chat." }), el("div.row", {}, run), answer);
}

function resultOf(call) {
  if (call.approval_id) return el("div.banner", { data: { tone: "wait" } }, "It waits for approval.", el("a.button.small", { href: href("/approvals", call.approval_id) }, "Decide"));
  return el("div.form", {}, factRow([badge(call.state), duration(call.duration_ms), call.worker ? ["Worker", call.worker] : null]),
    call.error ? textView(`${call.error.code}: ${call.error.text}`, "Error") : valueView(call.value, "Result"));
}

function dedented(text) {
  return text.split("\n").map((line) => line.replace(/^ {4}/, "")).join("\n").trim();
}

function chatOf() {
  try {
    return localStorage.getItem(CHAT_KEY) ?? "console-trials";
  } catch {
    return "console-trials";
  }
}

function rememberChat(key) {
  try {
    localStorage.setItem(CHAT_KEY, key);
  } catch {
    // Storage is switched off.
  }
}
