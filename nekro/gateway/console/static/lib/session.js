/** Who is logged in, and what that key may do. */

import { send, setToken } from "./api.js";

const URL = "/console/session";
let known = null;

/**
 * Return {key_id, name, scopes, chats, user_id, expires_at}; key_id is null for the local key of the machine's user.
 *
 * @throws {ApiError} 401 without a session
 */
export function session({ again = false } = {}) {
  if (again || known === null) {
    known = send(URL).then((response) => response.json());
    setToken(known.then((found) => found.csrf_token, () => null));
    known.catch(() => { known = null; });
  }
  return known;
}

/** Log in with a key, or with the code of a link. */
export async function login(key) {
  const response = await send(URL, { method: "POST", body: { key }, quiet: true, withoutToken: true });
  known = response.json();
  setToken(known.then((found) => found.csrf_token));
  return known;
}

export async function logout() {
  await send(URL, { method: "DELETE", quiet: true });
  known = null;
}
