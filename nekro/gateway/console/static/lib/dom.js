/**
 * The only place where elements are created.
 *
 * Everything that comes from people, models, plugins and sandboxes is set as text or as a plain attribute. No
 * function here, and none elsewhere in the console, parses markup. Invisible characters of a text are escaped.
 */

import { visible } from "./visible.js";

const SVG = "http://www.w3.org/2000/svg";
/** Set as properties, because their attributes mean the initial value only. */
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "open", "readOnly", "indeterminate", "multiple", "required"]);
const URLS = new Set(["href", "src"]);

/**
 * Create an element.
 *
 * @param {string} name tag with optional classes: "button.quiet.small"
 * @param {object} props attributes; besides: class, text, on {event: listener}, data {name: value},
 *   aria {name: value}, style {property: value}. null, undefined and false are left out.
 * @param {...(Node|string|number|Array|null|undefined|false)} children strings become text nodes
 */
export function el(name, props = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  apply(node, props);
  append(node, children);
  return node;
}

/** Create an SVG element; its attributes are set as they are. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  append(node, children);
  return node;
}

/** Replace the content of a node. */
export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

/** When a pressed pointer delays no new content any more, and how long it does so, in milliseconds. */
let pressedUntil = 0;
const PRESS_MILLISECONDS = 5_000;
document.addEventListener("pointerdown", () => { pressedUntil = Date.now() + PRESS_MILLISECONDS; }, true);
// The click follows at once.
for (const type of ["pointerup", "pointercancel"]) document.addEventListener(type, () => { pressedUntil = 0; }, true);

/** Wait while a pointer is pressed: an element that is replaced between press and release gets no click. */
export async function unpressed() {
  while (Date.now() < pressedUntil) await new Promise((go) => setTimeout(go, 20));
}

/** Set the text of a node, but touch the document only if it differs. */
export function setText(node, text) {
  const wanted = visible(String(text ?? ""));
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Return a URL if it is safe to follow, else "#". Only paths of this origin, fragments, blobs, http(s) and mailboxes are. */
export function safeUrl(value) {
  const text = String(value);
  if (text.startsWith("#")) return text;
  let url;
  try {
    url = new URL(text, location.origin);
  } catch {
    return "#";
  }
  return ["http:", "https:", "blob:", "mailto:"].includes(url.protocol) ? text : "#";
}

function apply(node, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = `${node.className} ${value}`.trim();
    else if (name === "text") node.textContent = visible(String(value));
    else if (name === "on") for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    else if (name === "data") for (const [key, item] of Object.entries(value)) node.dataset[key] = String(item);
    else if (name === "aria") for (const [key, item] of Object.entries(value)) setAria(node, key, item);
    else if (name === "style") for (const [key, item] of Object.entries(value)) node.style.setProperty(key, item);
    else if (PROPERTIES.has(name)) node[name] = value;
    else if (/^on/i.test(name) || name === "srcdoc") throw new Error(`attribute ${name} is not allowed`);
    else node.setAttribute(name, URLS.has(name) ? safeUrl(value) : value === true ? "" : String(value));
  }
}

function setAria(node, key, value) {
  if (value !== null && value !== undefined) node.setAttribute(`aria-${key}`, String(value));
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : visible(String(child)));
  }
}
