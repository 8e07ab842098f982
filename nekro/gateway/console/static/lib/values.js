/** JSON values for people: on one line in lists, indented when opened. */

import { el, fill } from "./dom.js";
import { bytes, count, short } from "./format.js";
import { button, copyButton } from "./widgets.js";

/** Longer texts are cut at first. */
const MOST_CHARS = 20_000;

/** A value on one line, as Python would write it. */
export function inline(value, most = 80) {
  return short(written(value, 0, { left: most * 2 }), most);
}

/** Arguments on one line: "1, b=2". They are recorded as {"args": [...], "kwargs": {...}} or as [args, kwargs]. */
export function inlineArguments(value, most = 80) {
  const [args, kwargs] = parts(value);
  const texts = [...args.map((one) => inline(one, most)), ...Object.entries(kwargs).map(([name, one]) => `${name}=${inline(one, most)}`)];
  return short(texts.join(", "), most);
}

/** A value in full, with a button to copy it. */
export function valueView(value, label) {
  return textView(typeof value === "string" ? value : JSON.stringify(value, null, 2), label);
}

/** A long text: cut first, in full on demand. */
export function textView(text, label, { kind = "pre.text" } = {}) {
  const shown = el(kind, { tabindex: "0", role: "group", aria: { label } }, text.length > MOST_CHARS ? text.slice(0, MOST_CHARS) : text);
  const rest = text.length > MOST_CHARS
    ? button(`Show all ${count(text.length)} characters`, () => { fill(shown, text); rest.remove(); }, { kind: "small" })
    : null;
  return el("div.value", {}, shown, copyButton(text, `Copy ${label.toLowerCase()}`), rest);
}

/** What is said of a value that is not kept: its size. */
export function notKept(size) {
  return el("p.quiet-text", {}, `Not kept, because it is long (${bytes(size)}).`);
}

function parts(value) {
  if (Array.isArray(value) && value.length === 2 && Array.isArray(value[0]) && isObject(value[1])) return value;
  if (isObject(value) && (Array.isArray(value.args) || isObject(value.kwargs))) return [value.args ?? [], value.kwargs ?? {}];
  return value === null || value === undefined ? [[], {}] : [[value], {}];
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function written(value, depth, room) {
  if (room.left <= 0 || depth > 6) return "…";
  const text = Array.isArray(value) ? `[${items(value, (one) => written(one, depth + 1, room))}]`
    : isObject(value) ? `{${items(Object.entries(value), ([name, one]) => `${JSON.stringify(name)}: ${written(one, depth + 1, room)}`)}}`
      : plain(value);
  room.left -= text.length;
  return text;
}

const items = (list, write) => list.slice(0, 12).map(write).join(", ") + (list.length > 12 ? ", …" : "");

function plain(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  return typeof value === "string" ? JSON.stringify(value.slice(0, 400)) : String(value);
}
