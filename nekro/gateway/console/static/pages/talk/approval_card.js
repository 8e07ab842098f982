/** What a call that needs approval would run, with the controls to decide. On its own page and in chats. */

import { get, newest, path, post } from "../../lib/api.js";
import { el, fill } from "../../lib/dom.js";
import { href } from "../../lib/router.js";
import { jsonOf } from "../../lib/schema_form.js";
import { badge } from "../../lib/states.js";
import { codeView } from "../../lib/python.js";
import { textView } from "../../lib/values.js";
import { visibleJson } from "../../lib/visible.js";
import { acting, ask, button, copyButton, factRow, field, fold, loading, nextId, say, time } from "../../lib/widgets.js";

const SCOPES = [["once", "This call only"], ["turn", "Further calls of this method in the same turn"], ["chat", "Further calls of this method in this chat"]];

/**
 * @param {object} item a request for approval in full
 * @param {object} options onDecided(): a decision was made or revoked, read the request again; isCompact
 */
export function approvalCard(item, { onDecided, isCompact = false }) {
  const title = el("h2", { id: nextId("approval") }, item.state === "pending" ? "May this run?" : "What was asked");
  return el("section.card.approval", { aria: { labelledby: title.id }, data: { approval: item.id } },
    el("div.split", {}, title, badge(item.state)),
    factRow([
      `No. ${item.number}`,
      isCompact ? el("span.mono", {}, item.method) : null,
      isCompact ? null : el("a", { href: href("/chats", item.chat_key) }, item.chat_key),
      item.user_id ? `for ${item.user_id}` : null,
      ["Asked", time(item.requested_at)],
      item.state === "pending" ? ["expires", time(item.expires_at, { relative: true })] : null,
      item.turn_id ? el("a", { href: href("/turns", item.turn_id) }, "The turn") : null,
    ]),
    item.call ? el("div.code-frame", {}, codeView(item.call, { label: "The call" }).node, copyButton(item.call, "Copy the call")) : null,
    item.difference ? fold("What was changed before it was approved", () => textView(item.difference, "Difference"), { open: true }) : null,
    item.state === "pending" ? decision(item, onDecided) : outcome(item, onDecided));
}

function decision(item, onDecided) {
  const name = nextId("scope");
  const scopes = SCOPES.map(([value, text]) => {
    const box = el("input", { type: "radio", name, value, id: nextId("scope"), checked: value === "once" });
    return el("div.field.tick", {}, box, el("label", { for: box.id }, text));
  });
  const edited = el("textarea.mono", { rows: "6", spellcheck: "false", value: visibleJson(JSON.stringify(item.arguments ?? {}, null, 2)) });
  const original = edited.value;
  const reason = el("input", { maxlength: "2000", autocomplete: "off" });
  const form = el("form.form", { on: { submit: (event) => event.preventDefault() } },
    el("fieldset", {}, el("legend", {}, "If you approve"), scopes,
      fold("Change the arguments", () => field("Arguments", edited, { hint: "JSON: “args” are positional, “kwargs” named." }))),
    field("Reason", reason, { optional: true, hint: "The agent reads it, and it is recorded." }));
  const decide = (verdict) => acting(async () => {
    const scope = form.querySelector(`input[name="${name}"]:checked`).value;
    const body = { decision: verdict, reason: reason.value || null };
    if (verdict === "approve") {
      body.scope = scope;
      if (edited.value !== original) {
        const { args = [], kwargs = {} } = jsonOf(edited.value, "Arguments") ?? {};
        Object.assign(body, { args, kwargs });
      }
    }
    await post(`${path("/approvals", item.id)}/decision`, body);
    say(verdict === "approve" ? "Approved. It runs now." : "Denied.");
    document.dispatchEvent(new Event("nekro:approvals"));
    await onDecided();
  });
  form.append(el("div.row.decide", {}, button("Approve", decide("approve"), { kind: "primary", data: { key: "approve" } }), button("Deny", decide("deny"), { kind: "danger", data: { key: "deny" } })));
  return form;
}

function outcome(item, onDecided) {
  const isGranted = item.state === "approved" && item.scope !== "once" && !item.revoked_at;
  return el("div.form", {},
    el("dl.pairs", {}, [
      ["Decided by", item.decided_by ?? "–"],
      ["When", time(item.decided_at)],
      ["Reason", item.reason ?? "–"],
      item.scope ? ["Permits", SCOPES.find(([key]) => key === item.scope)?.[1] ?? item.scope] : null,
      item.revoked_at ? ["Revoked", time(item.revoked_at)] : null,
      item.call_state ? ["The call", badge(item.call_state)] : null,
      item.call_error ? ["Error", `${item.call_error.code}: ${item.call_error.text}`] : null,
    ].filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    isGranted ? button("Revoke", acting(async () => {
      if (!await ask({ title: "Revoke the permission?", content: el("p", {}, "Further calls of the method need approval again."), confirm: "Revoke", danger: true })) return;
      await post(`${path("/approvals", item.id)}/revoke`);
      await onDecided();
    }), { kind: "danger" }) : null);
}

/** A card that reads the request first, for places that know its id only. */
export function approvalById(id, { signal, onDecided, ...options }) {
  const place = el("div", {}, loading(2));
  const load = newest(() => get(path("/approvals", id), {}, signal), (item) => {
    fill(place, approvalCard(item, { ...options, onDecided: () => { onDecided?.(); return load(); } }));
  }, signal);
  load().catch((error) => { if (error.name !== "AbortError") fill(place, el("p.fault", {}, error.message)); });
  return place;
}
