/**
 * A form from a JSON schema, for configurations. It reads back what has been changed, and nothing else.
 *
 * Types without a control of their own are edited as JSON.
 */

import { el } from "./dom.js";
import { field, nextId, select, tick } from "./widgets.js";

/** How deep objects become groups of fields; deeper ones are JSON. */
const MOST_DEPTH = 3;

/**
 * @param {object} schema JSON schema of an object
 * @param {object} values present values, without secrets
 * @param {Object<string, boolean>} secrets secret fields ("group.field") and whether each is set
 * @returns {{node: HTMLElement, read: function(): object}} `read` returns the changed fields; throws on what is no JSON
 */
export function schemaForm(schema, values, secrets) {
  const group = new Group(schema, schema.$defs ?? {}, values ?? {}, secrets ?? {}, "", 0);
  return { node: el("div.form", {}, group.nodes), read: () => group.read() };
}

class Group {
  constructor(schema, defs, values, secrets, prefix, depth) {
    this.members = Object.entries(schema.properties ?? {}).map(([name, raw]) => {
      const property = plain(raw, defs);
      const key = prefix ? `${prefix}.${name}` : name;
      return [name, memberOf(key, name, property, { defs, value: values?.[name], secrets, depth })];
    }).filter(([, member]) => member !== null);
    this.nodes = this.members.map(([, member]) => member.node);
  }

  read() {
    const found = {};
    for (const [name, member] of this.members) {
      const value = member.read();
      if (value !== undefined) found[name] = value;
    }
    return found;
  }
}

function memberOf(key, name, property, context) {
  const label = property.title || name;
  const options = { hint: property.description ?? null };
  if (key in context.secrets) return secretField(label, context.secrets[key], options);
  if (property.is_hidden) return null;
  if (property.type === "object" && property.properties && context.depth < MOST_DEPTH) return groupField(key, label, property, context);
  const old = context.value === undefined ? property.default : context.value;
  if (Array.isArray(property.enum)) return enumField(label, property, old, options);
  if (property.type === "boolean") return boolField(label, old, options);
  if (property.type === "integer" || property.type === "number") return numberField(label, property, old, options);
  if (property.type === "string") return textField(label, property, old, options);
  if (property.type === "array" && plain(property.items ?? {}, context.defs).type === "string") return linesField(label, old, options);
  return jsonField(label, old, options);
}

/** Follow references, and treat "x or null" as an optional x. */
function plain(schema, defs, depth = 0) {
  if (depth > 8) return schema;
  const named = schema.$ref ?? (schema.allOf?.length === 1 ? schema.allOf[0].$ref : undefined);
  if (named) return plain({ ...defs[named.split("/").at(-1)], ...without(schema, "$ref", "allOf") }, defs, depth + 1);
  const choices = schema.anyOf?.filter((one) => one.type !== "null");
  if (choices?.length === 1) return { ...plain(choices[0], defs, depth + 1), ...without(schema, "anyOf"), nullable: true };
  if ("const" in schema) return { ...schema, enum: [schema.const] };
  return schema;
}

const without = (object, ...names) => Object.fromEntries(Object.entries(object).filter(([name]) => !names.includes(name)));

/** A member that reads back its value if the control differs from what it showed first. */
function member(node, control, read) {
  const first = control.type === "checkbox" ? control.checked : control.value;
  return { node, read: () => ((control.type === "checkbox" ? control.checked : control.value) === first ? undefined : read()) };
}

function secretField(label, isSet, options) {
  const control = el("input", { type: "password", autocomplete: "new-password", placeholder: isSet ? "Set; type to replace it" : "Not set" });
  return member(field(label, control, { ...options, hint: [options.hint, "A secret: it is stored and never shown."].filter(Boolean).join(" ") }), control, () => control.value);
}

function groupField(key, label, property, { defs, value, secrets, depth }) {
  const group = new Group(property, defs, value ?? property.default ?? {}, secrets, key, depth + 1);
  const read = () => {
    const found = group.read();
    return Object.keys(found).length ? found : undefined;
  };
  return { node: el("fieldset", {}, el("legend", {}, label), property.description ? el("p.hint", {}, property.description) : null, group.nodes), read };
}

function enumField(label, property, old, options) {
  const written = (value) => JSON.stringify(value);
  const control = select(property.enum.map((one) => [written(one), String(one)]), written(old));
  return member(field(label, control, options), control, () => JSON.parse(control.value));
}

function boolField(label, old, options) {
  const { box, node } = tick(label, Boolean(old), { hint: options.hint });
  return member(node, box, () => box.checked);
}

function numberField(label, property, old, options) {
  const control = el("input", {
    type: "number", step: property.type === "integer" ? "1" : "any", min: property.minimum, max: property.maximum, value: old ?? "", required: !property.nullable, inputmode: "decimal",
  });
  return member(field(label, control, options), control, () => (control.value === "" ? null : Number(control.value)));
}

function textField(label, property, old, options) {
  const isLong = property.is_textarea || String(old ?? "").length > 120 || String(old ?? "").includes("\n");
  const control = isLong ? el("textarea", { value: old ?? "" }) : el("input", { type: "text", value: old ?? "", autocomplete: "off", placeholder: property.placeholder || null });
  return member(field(label, control, options), control, () => (property.nullable && control.value === "" ? null : control.value));
}

function linesField(label, old, options) {
  const control = el("textarea", { value: (old ?? []).join("\n"), rows: "3" });
  return member(field(label, control, { ...options, hint: [options.hint, "One per line."].filter(Boolean).join(" ") }), control,
    () => control.value.split("\n").map((line) => line.trim()).filter(Boolean));
}

function jsonField(label, old, options) {
  const control = el("textarea.mono", { value: old === undefined ? "" : JSON.stringify(old, null, 2), rows: "4", id: nextId("json"), spellcheck: "false" });
  return member(field(label, control, { ...options, hint: [options.hint, "JSON."].filter(Boolean).join(" ") }), control, () => jsonOf(control.value, label));
}

/** Parse JSON of a control; the error names it. An empty text is undefined. */
export function jsonOf(text, label) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label} is not JSON: ${error.message}`);
  }
}
