/** One request for approval: exactly what would run, and the decision. */

import { get, path } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { fill } from "../lib/dom.js";
import { href } from "../lib/router.js";
import { loading, pageHead } from "../lib/widgets.js";
import { approvalCard } from "./talk/approval_card.js";

export const title = "Approval";

export async function show(place, { params, signal, setTitle }) {
  fill(place, loading());
  let item = await get(path("/approvals", params.approval), {}, signal);
  setTitle(`Approve ${item.method}`);
  const draw = () => fill(place,
    pageHead({ title: item.method, crumbs: [["Approvals", href("/approvals")]] }),
    approvalCard(item, { onDecided: (decided) => { item = decided; draw(); place.querySelector("h1").focus(); } }));
  draw();
  whenChanged(["approvals"], async () => {
    if (item.state !== "pending" && !["queued", "running", "awaiting"].includes(item.call_state)) return;
    const newer = await get(path("/approvals", item.id), {}, signal);
    // What a person has begun to write stays unless something has changed.
    if (signal.aborted || newer.state === item.state && newer.call_state === item.call_state) return;
    item = newer;
    draw();
  }, { signal, chat: item.chat_key });
}
