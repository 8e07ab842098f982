/** Keys of the API: who may do what. A key's secret is shown once. */

import { get, path, post, remove } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { count, moment } from "../lib/format.js";
import { badge } from "../lib/states.js";
import { acting, ask, button, copyButton, empty, field, loaded, nextId, pageHead, say, table, tick, time } from "../lib/widgets.js";

export const title = "Keys";
const SCOPES = [
  ["read", "Read messages, events, turns and files"],
  ["post", "Post messages and files, cancel turns"],
  ["call", "Call methods"],
  ["run", "Run code"],
  ["approve", "Decide on calls that need approval"],
  ["admin", "Everything else: plugins, jobs, keys"],
];

export function show(place, { signal }) {
  const list = el("div");
  fill(place, pageHead({ title, lead: "Applications and people use the API and this console with a key.", actions: [button("New key", acting(() => create(() => again({ quietly: true }))), { kind: "primary" })] }), list);
  const again = loaded(list, async () => {
    const { items } = await get("/keys", {}, signal);
    return items.length ? table("Keys", columns(() => again({ quietly: true })), items.reverse(), { keyOf: (one) => one.id }) : empty("No keys", "Without keys the gateway serves this machine only.");
  }, { signal });
  whenChanged(["keys"], () => again({ quietly: true }), { signal });
}

function stateOf(key) {
  if (key.revoked_at) return "revoked";
  return key.expires_at && moment(key.expires_at) <= Date.now() ? "expired" : "ok";
}

function columns(onChange) {
  return [
    { title: "Name", cell: (one) => el("span.stack", {}, el("span", {}, one.name), el("span.quiet-text.mono", {}, one.id)) },
    { title: "May", cell: (one) => el("span.tags", {}, one.scopes.map((scope) => el("span.tag", {}, scope))) },
    { title: "Chats", cell: (one) => el("span.mono", {}, one.chats) },
    { title: "Limits", cell: (one) => limits(one) },
    { title: "Stored", class: "tight", cell: (one) => `${count(one.stored_bytes)} bytes` },
    { title: "Expires", cell: (one) => one.expires_at ? time(one.expires_at) : "never" },
    { title: "State", class: "tight", cell: (one) => badge(stateOf(one), stateOf(one) === "ok" ? "Valid" : undefined) },
    { title: "", class: "tight", cell: (one) => one.revoked_at ? "" : button("Revoke", acting(async () => {
      const gone = await ask({ title: `Revoke “${one.name}”?`, content: el("p", {}, "It is refused from the next request on."), confirm: "Revoke", danger: true, read: () => remove(path("/keys", one.id)) });
      if (!gone) return;
      say("Revoked.");
      onChange();
    }), { kind: "small danger", label: `Revoke the key “${one.name}”`, data: { key: `revoke-${one.id}` } }) },
  ];
}

function limits(key) {
  return [
    key.user_id ? `user ${key.user_id}` : null,
    key.requests_per_minute ? `${count(key.requests_per_minute)} requests a minute` : null,
    key.cost_per_day ? `cost ${key.cost_per_day} a day` : null,
    key.stored_bytes_limit ? `${count(key.stored_bytes_limit)} bytes stored` : null,
    key.tokens_per_day ? `${count(key.tokens_per_day)} tokens a day` : null,
  ].filter(Boolean).join(", ") || "none";
}

async function create(onChange) {
  const name = el("input", { required: true, maxlength: "200", autocomplete: "off" });
  const scopes = SCOPES.map(([scope, text]) => [scope, tick(`${scope}: ${text}`, ["read", "post"].includes(scope))]);
  const chats = el("input", { value: "*", required: true, autocomplete: "off" });
  const user = el("input", { autocomplete: "off" });
  const rate = el("input", { type: "number", min: "0", step: "1" });
  const spend = el("input", { type: "number", min: "0", step: "any" });
  const tokens = el("input", { type: "number", min: "0", step: "1" });
  const stored = el("input", { type: "number", min: "0", step: "1" });
  const expires = el("input", { type: "datetime-local" });
  const number = (control) => (control.value === "" ? null : Number(control.value));
  const made = await ask({
    title: "New key",
    wide: true,
    confirm: "Create",
    content: [
      field("Name", name),
      el("fieldset", {}, el("legend", {}, "It may"), scopes.map(([, one]) => one.node)),
      field("Chats", chats, { hint: "A pattern: * stands for any text." }),
      field("Acts for user", user, { optional: true }),
      el("div.grid", {}, field("Requests per minute", rate, { optional: true }), field("Cost per day", spend, { optional: true }), field("Tokens per day", tokens, { optional: true }), field("Bytes stored", stored, { optional: true }), field("Expires", expires, { optional: true })),
    ],
    read: () => post("/keys", {
      name: name.value, scopes: scopes.filter(([, one]) => one.box.checked).map(([scope]) => scope), chats: chats.value, user_id: user.value || null,
      requests_per_minute: number(rate), cost_per_day: number(spend), tokens_per_day: number(tokens), stored_bytes_limit: number(stored),
      expires_at: expires.value ? new Date(expires.value).toISOString() : null,
    }),
  });
  if (!made) return;
  onChange();
  await shown(made);
}

function shown(made) {
  const secret = el("input.mono", { value: made.key, readOnly: true, id: nextId("secret"), on: { focus: (event) => event.target.select() } });
  return ask({ title: "Your new key", confirm: "I have copied it", content: [el("p", {}, "Copy it now: it is not stored and cannot be shown again."), field("Key", secret), el("div.row", {}, copyButton(made.key, "Copy the key"))] });
}
