/**
 * The stream of changes: one per tab, which all pages share, so that no page asks at intervals.
 *
 * A hint names a kind and mostly a chat, and nothing of the content: who shows something of that kind reads it
 * again. The hint "reset" says that hints may have been missed, and concerns everyone.
 */

import { isPassing } from "./api.js";
import { follow } from "./stream.js";

const URL = "/api/v1/changes";
/** Hints that come together are answered with one reading. */
const GATHER_MILLISECONDS = 100;
/** Pause between two readings of the same list. */
const PAUSE_MILLISECONDS = 700;
/** Pause after a reading that failed. */
const RETRY_MILLISECONDS = 4_000;

const listeners = new Set();
let connection = null;
let onState = () => {};

/** Call a function with "connecting", "live", "waiting" or "refused", and the error of the last two. */
export function whenConnectionChanges(callback) {
  onState = callback;
}

/** Connect, unless the tab is connected already or was refused. */
export function connect() {
  if (connection) return;
  connection = new AbortController();
  follow(URL, { signal: connection.signal, onEvent: ({ data }) => notify(data), onState: (state, error) => onState(state, error) });
}

/** Disconnect; the next `connect` begins anew. */
export function disconnect() {
  connection?.abort();
  connection = null;
}

/**
 * Run `work` after changes of some kinds, until `signal` aborts. It does not run twice at a time, nor while the
 * tab is hidden; what changes meanwhile is one more run afterwards.
 *
 * @param {string[]} kinds as GET /api/v1/changes names them
 * @param {function(): Promise<boolean|void>} work reads again; false, or an error that may pass: it is tried again
 * @param {object} options signal; chat: only changes of this chat, or of any; pause: milliseconds between two runs
 */
export function whenChanged(kinds, work, { signal, chat = null, pause = PAUSE_MILLISECONDS }) {
  const listener = new Listener(new Set(kinds), work, chat, pause);
  listeners.add(listener);
  signal.addEventListener("abort", () => { listeners.delete(listener); listener.stop(); }, { once: true });
}

function notify({ kind, chat_key: chat }) {
  for (const listener of listeners) if (listener.concerns(kind, chat)) listener.notify();
}

class Listener {
  constructor(kinds, work, chat, pause) {
    Object.assign(this, { kinds, work, chat, pause, timer: null, isDue: false, isBusy: false, isStopped: false, notBefore: 0 });
  }

  concerns(kind, chat) {
    return kind === "reset" || (this.kinds.has(kind) && (this.chat === null || !chat || chat === this.chat));
  }

  notify() {
    this.isDue = true;
    this.plan();
  }

  plan() {
    if (!this.isDue || this.timer !== null || this.isBusy || this.isStopped || document.hidden) return;
    this.timer = setTimeout(() => this.run(), Math.max(GATHER_MILLISECONDS, this.notBefore - Date.now()));
  }

  async run() {
    Object.assign(this, { timer: null, isDue: false, isBusy: true });
    const hasFailed = await Promise.resolve(this.work()).catch((error) => !isPassing(error)) === false;
    this.isBusy = false;
    this.isDue ||= hasFailed;
    this.notBefore = Date.now() + (hasFailed ? RETRY_MILLISECONDS : this.pause);
    this.plan();
  }

  stop() {
    this.isStopped = true;
    clearTimeout(this.timer);
  }
}

document.addEventListener("visibilitychange", () => { for (const listener of listeners) listener.plan(); });
