/** Requests to the HTTP API of this gateway. Nothing else is ever requested. */

import { unpressed } from "./dom.js";

const BASE = "/api/v1";
/** Called when the API wants a login. */
let onLoginNeeded = () => {};
/** The session's token, which requests that change something repeat; null without a session. */
let token = Promise.resolve(null);

/** An error as the API reports it (a problem document), or a failed connection (status 0). */
export class ApiError extends Error {
  constructor({ status, code, detail, requestId = null, retryAfter = null }) {
    super(detail);
    this.status = status;
    this.code = code;
    this.requestId = requestId;
    /** Seconds to wait before another try; null if the API does not say. */
    this.retryAfter = retryAfter;
  }
}

/** Call a function when a request is refused because there is no session. */
export function whenLoginNeeded(callback) {
  onLoginNeeded = callback;
}

/** Say which token requests carry: a promise, for which they wait. */
export function setToken(promise) {
  token = promise;
}

/** Return a path from parts; each part after the first is percent-encoded: path("/chats", key, "files"). */
export function path(first, ...parts) {
  return [first, ...parts.map((part) => encodeURIComponent(part))].join("/");
}

/**
 * Send a request below /api/v1 and return its JSON body, or null without one.
 *
 * @param {object} options method; query (null values are left out); body (sent as JSON); form (FormData);
 *   signal; key (idempotency key of a POST that may be sent again)
 * @throws {ApiError}
 */
export async function api(where, { method = "GET", query = {}, body, form, signal, key } = {}) {
  const response = await send(BASE + where + queryText(query), { method, body, form, signal, key });
  return response.status === 204 ? null : response.json();
}

export const get = (where, query, signal) => api(where, { query, signal });
export const post = (where, body = undefined, options = {}) => api(where, { method: "POST", body, ...options });
export const patch = (where, body) => api(where, { method: "PATCH", body });
export const put = (where, body) => api(where, { method: "PUT", body });
export const remove = (where) => api(where, { method: "DELETE" });

/**
 * Return a function that reads, and shows what was read. It may be called while an answer of it is on its way: one
 * that a later one has overtaken is dropped, as is its error, so that what is shown never goes back in time.
 *
 * For the same reason the answer to a request that changes something is not shown: what follows from the change
 * may have been read before that answer comes.
 */
export function newest(read, show, signal = null) {
  let started = 0;
  let shown = 0;
  return async (...options) => {
    const number = started += 1;
    const isLate = () => signal?.aborted || number < shown;
    let answer;
    try {
      answer = await read(...options);
    } catch (error) {
      if (isLate()) return;
      throw error;
    }
    await unpressed();
    if (isLate()) return;
    shown = number;
    show(answer);
  };
}

/** Send a request to any path of this origin and return its Response; others than 2xx become an ApiError. */
export async function send(url, { method = "GET", body, form, signal, key, headers = {}, quiet = false, withoutToken = false } = {}) {
  const all = { Accept: "application/json", ...headers };
  if (body !== undefined) all["Content-Type"] = "application/json";
  if (method === "POST") all["Idempotency-Key"] = key ?? newKey();
  const secret = method === "GET" || withoutToken ? null : await token;
  if (secret) all["X-Nekro-CSRF"] = secret;
  let response;
  try {
    response = await fetch(url, {
      method,
      headers: all,
      body: form ?? (body === undefined ? undefined : JSON.stringify(body)),
      signal,
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError({ status: 0, code: "unreachable", detail: "The gateway does not answer." });
  }
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (response.status === 401 && !quiet) onLoginNeeded();
  throw problem;
}

/** Whether a request that failed may succeed a little later. */
export function isPassing(error) {
  return error instanceof ApiError && (error.status === 0 || error.status === 429 || error.status >= 500);
}

/** Return a new random key. crypto.randomUUID exists on secure origins only. */
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function queryText(query) {
  const found = Object.entries(query ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return found.length ? `?${new URLSearchParams(found.map(([name, value]) => [name, String(value)]))}` : "";
}

async function problemOf(response) {
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    // A proxy in front may answer without a problem document.
  }
  const wait = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new ApiError({
    status: response.status,
    code: typeof problem.code === "string" ? problem.code : "http_error",
    detail: typeof problem.detail === "string" ? problem.detail : `The gateway answered with status ${response.status}.`,
    requestId: problem.request_id ?? null,
    retryAfter: Number.isFinite(wait) ? wait : null,
  });
}
