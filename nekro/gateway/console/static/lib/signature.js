/** A form from the text of a method's signature: "(name: str, portions: int = 2, *, is_vegan: bool = False) -> dict". */

import { el } from "./dom.js";
import { jsonOf } from "./schema_form.js";
import { field, tick } from "./widgets.js";

/** Return the parameters: {name, type, default, kind}; kind is "positional", "normal", "named", "rest" or "other". */
export function parameters(signature) {
  const found = [];
  let kind = "normal";
  for (const text of split(inner(signature))) {
    if (text === "/") { found.forEach((one) => { one.kind = "positional"; }); continue; }
    if (text === "*") { kind = "named"; continue; }
    const stars = /^\**/.exec(text)[0].length;
    const [declared, preset] = cut(text.slice(stars), "=");
    const [name, type] = cut(declared, ":");
    found.push({ name, type: type ?? "", default: preset, kind: stars === 2 ? "other" : stars === 1 ? "rest" : kind });
    if (stars === 1) kind = "named";
  }
  return found;
}

/**
 * A form for arguments.
 *
 * @returns {{node: HTMLElement, read: function(): {args: Array, kwargs: object}}} `read` throws on a faulty field
 */
export function argumentForm(signature) {
  const fields = parameters(signature).map(fieldOf);
  const node = el("div.form", {}, fields.length ? fields.map((one) => one.node) : el("p.quiet-text", {}, "It takes no arguments."));
  return {
    node,
    read() {
      const args = [];
      const kwargs = {};
      for (const { parameter, read } of fields) {
        const value = read();
        if (value === undefined) continue;
        if (parameter.kind === "other") Object.assign(kwargs, value);
        else if (parameter.kind === "rest") args.push(...value);
        else if (parameter.kind === "positional") args.push(value);
        else kwargs[parameter.name] = value;
      }
      return { args, kwargs };
    },
  };
}

function fieldOf(parameter) {
  const { name, type, kind } = parameter;
  const isOptional = parameter.default !== undefined || kind === "rest" || kind === "other";
  const hint = [type, parameter.default === undefined ? null : `default ${parameter.default}`].filter(Boolean).join(", ") || null;
  const simple = type.replace(/\s*\|\s*None$/, "").replace(/^Optional\[(.*)\]$/, "$1");
  if (simple === "bool" && kind !== "rest") {
    const { box, node } = tick(name, parameter.default === "True", { hint });
    return { parameter, node, read: () => (isOptional && box.checked === (parameter.default === "True") ? undefined : box.checked) };
  }
  const isNumber = ["int", "float"].includes(simple) && kind !== "rest";
  const isText = simple === "str" && kind !== "rest";
  const control = isNumber ? el("input", { type: "number", step: simple === "int" ? "1" : "any" })
    : isText ? el("textarea", { rows: "1" })
      : el("textarea.mono", { rows: "2", spellcheck: "false" });
  const note = isNumber || isText ? hint : [hint, kind === "rest" ? "a JSON array" : kind === "other" ? "a JSON object" : "JSON"].filter(Boolean).join("; ");
  const read = () => {
    if (control.value === "" && isOptional) return undefined;
    if (isText) return control.value;
    if (control.value === "") throw new Error(`${name} is missing.`);
    return isNumber ? Number(control.value) : jsonOf(control.value, name);
  };
  return { parameter, node: field(name, control, { hint: note, optional: isOptional }), read };
}

/** The text between the outer parentheses. */
function inner(signature) {
  let depth = 0;
  for (let at = 0; at < signature.length; at += 1) {
    if ("([{".includes(signature[at])) depth += 1;
    if (")]}".includes(signature[at])) depth -= 1;
    if (depth === 0 && at > 0) return signature.slice(1, at);
  }
  return signature.slice(1);
}

/** Split at commas that are outside of brackets and strings. */
function split(text) {
  const parts = [];
  let part = "";
  walk(text, (char, isOutside) => {
    if (char === "," && isOutside) { parts.push(part.trim()); part = ""; } else part += char;
  });
  return [...parts, part.trim()].filter(Boolean);
}

/** Cut at the first such character outside of brackets and strings; the second part is undefined without it. */
function cut(text, wanted) {
  let at = -1;
  walk(text, (char, isOutside, index) => { if (char === wanted && isOutside && at < 0) at = index; });
  return at < 0 ? [text.trim(), undefined] : [text.slice(0, at).trim(), text.slice(at + 1).trim()];
}

function walk(text, visit) {
  let depth = 0;
  let quote = null;
  for (let at = 0; at < text.length; at += 1) {
    const char = text[at];
    if (quote) {
      if (char === quote && text[at - 1] !== "\\") quote = null;
    } else if (char === '"' || char === "'") quote = char;
    else if ("([{".includes(char)) depth += 1;
    else if (")]}".includes(char)) depth -= 1;
    visit(char, depth === 0 && !quote, at);
  }
}
