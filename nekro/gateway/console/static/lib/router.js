/** Addresses of pages: the part after "#". A page is found by the pattern of its address. */

/** Return the address of a page: href("/turns", id) or href("/chats", key, "talk"). */
export function href(first, ...parts) {
  return `#${[first, ...parts.map((part) => encodeURIComponent(part))].join("/")}`;
}

/** Return path segments and query of the present address. */
export function here() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?", 2);
  return { segments: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query), path };
}

/** Go to an address of `href`. */
export function go(address, { replace = false } = {}) {
  if (replace) location.replace(address);
  else location.hash = address.replace(/^#/, "");
}

/** Change the query of the present address, without loading the page again. */
export function remember(values) {
  const { path, query } = here();
  for (const [name, value] of Object.entries(values)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  const text = query.toString();
  history.replaceState(null, "", `#${path}${text ? `?${text}` : ""}`);
}

/**
 * Return the route that fits, with its parameters.
 *
 * @param {Array<{pattern: string}>} routes patterns such as "/turns/:id"
 */
export function match(routes, segments) {
  for (const route of routes) {
    const parts = route.pattern.split("/").filter(Boolean);
    if (parts.length !== segments.length) continue;
    const params = {};
    const fits = parts.every((part, at) => {
      if (!part.startsWith(":")) return part === segments[at];
      params[part.slice(1)] = segments[at];
      return true;
    });
    if (fits) return { route, params };
  }
  return null;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
