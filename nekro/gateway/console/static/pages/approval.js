/** One request for approval: exactly what would run, and the decision. */

import { get, newest, path } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { fill } from "../lib/dom.js";
import { href } from "../lib/router.js";
import { loading, pageHead } from "../lib/widgets.js";
import { approvalCard } from "./talk/approval_card.js";

export const title = "Approval";

export async function show(place, { params, signal, setTitle }) {
  fill(place, loading());
  const read = () => get(path("/approvals", params.approval), {}, signal);
  let item = await read();
  setTitle(`Approve ${item.method}`);
  const draw = () => fill(place,
    pageHead({ title: item.method, crumbs: [["Approvals", href("/approvals")]] }),
    approvalCard(item, { onDecided: async () => { await again(); place.querySelector("h1").focus(); } }));
  const again = newest(read, (newer) => {
    // What a person has begun to write stays unless something has changed.
    if (["state", "revoked_at", "call_state"].every((name) => newer[name] === item[name])) return;
    item = newer;
    draw();
  }, signal);
  draw();
  whenChanged(["approvals"], async () => {
    if (item.state !== "pending" && !["queued", "running", "awaiting"].includes(item.call_state)) return;
    await again();
  }, { signal, chat: item.chat_key });
}
