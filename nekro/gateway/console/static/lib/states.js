/** The words and tones of the states of turns, rounds, calls, jobs, approvals, plugins and servers. */

import { el } from "./dom.js";

/** Tones: quiet, good, busy, wait, bad. */
const STATES = {
  requested: ["Waiting", "wait"],
  waiting: ["Waiting", "wait"],
  queued: ["Queued", "wait"],
  awaiting: ["Needs approval", "wait"],
  pending: ["Pending", "wait"],
  running: ["Running", "busy"],
  done: ["Done", "good"],
  approved: ["Approved", "good"],
  ok: ["OK", "good"],
  live: ["Live", "good"],
  failed: ["Failed", "bad"],
  denied: ["Denied", "bad"],
  degraded: ["Degraded", "wait"],
  starting: ["Starting", "wait"],
  unknown: ["Outcome unknown", "bad"],
  cancelled: ["Cancelled", "quiet"],
  merged: ["Merged", "quiet"],
  expired: ["Expired", "quiet"],
  lost: ["Worker died", "bad"],
  released: ["Worker stopped", "quiet"],
  restarted: ["Met an outage", "quiet"],
  revoked: ["Revoked", "quiet"],
  disabled: ["Disabled", "quiet"],
  paused: ["Paused", "quiet"],
  new: ["Not listed yet", "wait"],
  gone: ["Gone", "quiet"],
  exhausted: ["Used up", "bad"],
  warned: ["Nearly used up", "wait"],
};

export const wordOf = (state) => STATES[state]?.[0] ?? String(state);
export const toneOf = (state) => STATES[state]?.[1] ?? "quiet";
export const isOpen = (state) => ["wait", "busy"].includes(toneOf(state));

/** A dot and a word. */
export function badge(state, word = wordOf(state)) {
  return el("span.badge", { data: { tone: toneOf(state) } }, word);
}
