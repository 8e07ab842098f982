/**
 * Server-sent events of a chat, over fetch: unlike EventSource it sees why a connection was refused, and it can
 * be paused while the page is hidden, so that forgotten tabs hold no connection.
 */

import { ApiError, send } from "./api.js";

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 15_000;
/** A page that is hidden for this long lets its streams go. */
const HIDDEN_MILLISECONDS = 30_000;

/**
 * Follow a stream until `signal` aborts. It connects again by itself, and goes on after the last event.
 *
 * @param {string} url path with its query
 * @param {object} options
 *   onEvent({type, id, data}) for each event;
 *   onState("connecting"|"live"|"waiting"|"refused", ApiError|null);
 *   signal; lastId: id of the last event that the page has, null to begin with the next one
 */
export function follow(url, { onEvent, onState = () => {}, signal, lastId = null }) {
  const follower = new Follower(url, onEvent, onState, signal, lastId);
  follower.run();
}

/** Follow the events of one chat. */
export function followChat(chatKey, { after = null, types = [], ...options }) {
  const query = new URLSearchParams();
  if (after !== null) query.set("after", String(after));
  if (types.length) query.set("types", types.join(","));
  const text = query.toString();
  follow(`/api/v1/chats/${encodeURIComponent(chatKey)}/events${text ? `?${text}` : ""}`, options);
}

class Follower {
  constructor(url, onEvent, onState, signal, lastId) {
    Object.assign(this, { url, onEvent, onState, signal, lastId });
    this.pause = FIRST_PAUSE;
  }

  async run() {
    while (!this.signal.aborted) {
      const visit = new AbortController();
      const stop = whenHidden(() => visit.abort());
      const end = () => visit.abort();
      this.signal.addEventListener("abort", end, { once: true });
      try {
        await this.connect(visit.signal);
      } catch (error) {
        if (!this.signal.aborted && !visit.signal.aborted && !this.mayTryAgain(error)) return;
      } finally {
        stop();
        this.signal.removeEventListener("abort", end);
      }
      if (this.signal.aborted) return;
      await visible(this.signal);
      await sleep(this.pause, this.signal);
      this.pause = Math.min(this.pause * 2, LONGEST_PAUSE);
    }
  }

  async connect(signal) {
    this.onState("connecting", null);
    const headers = { Accept: "text/event-stream" };
    if (this.lastId !== null) headers["Last-Event-ID"] = this.lastId;
    const response = await send(this.url, { headers, signal });
    this.pause = FIRST_PAUSE;
    this.onState("live", null);
    for await (const event of eventsOf(response)) {
      if (event.id !== null) this.lastId = event.id;
      if (event.data !== "") this.onEvent({ type: event.type, id: event.id, data: JSON.parse(event.data) });
    }
    this.onState("waiting", null);
  }

  mayTryAgain(error) {
    const isRefused = error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429;
    this.onState(isRefused ? "refused" : "waiting", error instanceof ApiError ? error : null);
    if (error.retryAfter) this.pause = Math.max(this.pause, error.retryAfter * 1000);
    return !isRefused;
  }
}

/** Yield the events of a response; comments are skipped. Source: HTML Standard, section 9.2.6. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = blank();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (event.id !== null || event.data.length) yield { ...event, data: event.data.join("\n") };
          event = blank();
        } else take(event, line);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function blank() {
  return { type: "message", id: null, data: [] };
}

function take(event, line) {
  const colon = line.indexOf(":");
  if (colon === 0) return;
  const name = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
  if (name === "event") event.type = value;
  else if (name === "data") event.data.push(value);
  else if (name === "id") event.id = value;
}

function whenHidden(callback) {
  let timer = null;
  const look = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(callback, HIDDEN_MILLISECONDS);
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
}

function visible(signal) {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look, { once: true });
  });
}

/** Wait so many milliseconds, or until the signal aborts. */
export function sleep(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
