/**
 * Which failures this browser has shown already.
 *
 * The API counts the turns that have failed since a moment. That moment stays the same for this browser, and the
 * count of a chat at its last visit is kept, so that the difference is what is new.
 */

import { get } from "./api.js";

const KEY = "nekro.failures-seen";
const SINCE_KEY = "nekro.failures-since";
const MOST = 500;
/** A browser's first visit shows the failures of the last week as new. */
const FIRST_MILLISECONDS = 7 * 86_400_000;

/** The moment since which failures are counted. */
export function failuresSince() {
  try {
    const known = localStorage.getItem(SINCE_KEY);
    if (known && !Number.isNaN(Date.parse(known))) return known;
    const first = new Date(Date.now() - FIRST_MILLISECONDS).toISOString();
    localStorage.setItem(SINCE_KEY, first);
    return first;
  } catch {
    return new Date(Date.now() - FIRST_MILLISECONDS).toISOString();
  }
}

/** How many failures of a chat are new. */
export function unread(chat) {
  const seen = read()[`k${chat.chat_key}`]?.count ?? 0;
  return Math.max(0, (chat.failures ?? 0) - seen);
}

/** Remember that a chat was looked at now. */
export async function markSeen(chatKey, signal) {
  try {
    const { items } = await get("/chats", { q: chatKey, failures_since: failuresSince(), limit: 200 }, signal);
    const chat = items.find((one) => one.chat_key === chatKey);
    if (chat?.failures) remember(chatKey, chat.failures);
  } catch {
    // The failures stay marked as new.
  }
}

function read() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    return found !== null && typeof found === "object" ? found : {};
  } catch {
    return {};
  }
}

function remember(chatKey, count) {
  const all = { ...read(), [`k${chatKey}`]: { count, at: Date.now() } };
  const newest = Object.entries(all).sort(([, one], [, other]) => other.at - one.at).slice(0, MOST);
  try {
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(newest)));
  } catch {
    // Storage is switched off.
  }
}
