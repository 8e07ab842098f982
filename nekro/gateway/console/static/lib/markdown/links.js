/** Addresses in texts of others: which of them may be followed. */

const MOST_CHARS = 2048;
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
/** Whitespace, control and invisible characters, and backslashes, which browsers read as slashes. */
const REFUSED = /[\s\\\p{C}\p{Default_Ignorable_Code_Point}]/u;

/**
 * Return the address as browsers understand it, or null if it is no absolute address of a web page or a mailbox.
 *
 * An address with a user's name is refused: behind a name that looks like a host, it leads to another one.
 */
export function linkTarget(text) {
  if (text.length > MOST_CHARS || !/^(?:https?:\/\/|mailto:.)/i.test(text) || REFUSED.test(text)) return null;
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  if (!PROTOCOLS.has(url.protocol) || url.username || url.password) return null;
  return url.href;
}
