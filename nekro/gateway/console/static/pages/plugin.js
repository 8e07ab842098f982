/** One plugin: state and versions, configuration, methods that can be tried. */

import { get, newest, patch, path, post } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { count, several } from "../lib/format.js";
import { href } from "../lib/router.js";
import { schemaForm } from "../lib/schema_form.js";
import { badge } from "../lib/states.js";
import { acting, ask, button, failed, loading, pageHead, say, section, table, time } from "../lib/widgets.js";
import { methodRow } from "./plugin/method.js";

export const title = "Plugin";

export async function show(place, { params, signal, setTitle }) {
  const key = params.plugin;
  fill(place, loading(5));
  const state = el("div");
  const head = el("div");
  let own = [];
  const read = () => Promise.all([get("/plugins", {}, signal), get("/methods", { text: `${key}.` }, signal)]);
  const draw = newest(read, ([{ items }, methods]) => {
    const plugin = items.find((one) => one.key === key);
    if (!plugin) throw Object.assign(new Error(`No worker serves the plugin ${key}.`), { status: 404 });
    setTitle(plugin.name || key);
    own = methods.items.filter((one) => one.plugin === key);
    fill(head, headOf(plugin, draw));
    fill(state, plugin.error ? el("div.banner", { data: { tone: "bad" } }, plugin.error) : null, versions(plugin));
  }, signal);
  await draw();
  if (signal.aborted) return;
  fill(place, head, state, await configuration(key, signal), methodList(own));
  // Also some time after a decision, when the workers have published what follows from it.
  whenChanged(["plugins"], draw, { signal });
}

function headOf(plugin, onChange) {
  const isOn = plugin.is_enabled;
  const toggle = button(isOn ? "Disable" : "Enable", acting(async () => {
    if (isOn && !await ask({ title: `Disable ${plugin.name || plugin.key}?`, content: el("p", {}, "No worker runs its methods until it is enabled again."), confirm: "Disable", danger: true })) return;
    await post(`${path("/plugins", plugin.key)}/${isOn ? "disable" : "enable"}`);
    say(isOn ? "Disabled on all workers." : "Enabled on all workers.");
    await onChange();
  }), { kind: isOn ? "danger" : "primary" });
  return pageHead({
    title: plugin.name || plugin.key,
    crumbs: [["Plugins", href("/plugins")]],
    lead: plugin.description,
    facts: [badge(plugin.status), el("span.mono", {}, plugin.key), plugin.version ? ["Version", plugin.version] : null, plugin.author ? ["By", plugin.author] : null],
    actions: [toggle],
  });
}

/** What the workers serve of it; usually all have the same. */
function versions({ versions: found = [] }) {
  if (!found.length) return null;
  return section("Workers", found.length > 1 ? el("div.banner", { data: { tone: "wait" } }, `The workers serve ${several(found.length, "version")} of it; callers see the first.`) : null,
    table("Versions and the workers that serve them", [
      { title: "Version", cell: (one) => el("span.stack", {}, el("span", {}, one.version || "–"), one.digest ? el("span.quiet-text.mono", { title: one.digest }, one.digest.slice(0, 12)) : null) },
      { title: "Workers", cell: (one) => el("span.mono", {}, one.workers.join(", ")) },
      { title: "Methods", class: "number", cell: (one) => count(one.methods) },
      { title: "Since", cell: (one) => time(one.published_at) },
      { title: "State", class: "tight", cell: (one) => el("span.stack", {}, badge(one.status), one.error ? el("span.fault", {}, one.error) : null) },
    ], found));
}

async function configuration(key, signal) {
  try {
    const config = await get(`${path("/plugins", key)}/config`, {}, signal);
    return configCard(key, config);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return error.status === 404 || error.status === 403 ? null : section("Configuration", failed(error));
  }
}

function configCard(key, config) {
  if (!Object.keys(config.schema.properties ?? {}).length) return section("Configuration", el("p.quiet-text", {}, "It has no settings."));
  const place = el("div");
  const fault = el("p.fault", { role: "alert" });
  let form = schemaForm(config.schema, config.values, config.secrets);
  fill(place, form.node);
  const save = async (event) => {
    event.preventDefault();
    fault.textContent = "";
    try {
      const values = form.read();
      if (!Object.keys(values).length) return say("Nothing was changed.");
      const saved = await patch(`${path("/plugins", key)}/config`, { values });
      form = schemaForm(saved.schema, saved.values, saved.secrets);
      fill(place, form.node);
      say("Saved. Every worker uses it from its next call on.");
    } catch (error) {
      fault.textContent = error.message;
    }
  };
  return section("Configuration", el("form.form.config", { on: { submit: save } }, place, fault, el("div.row", {}, el("button.button.primary", { type: "submit" }, "Save"))));
}

function methodList(methods) {
  return section(methods.length ? `Methods (${methods.length})` : "Methods", methods.length
    ? el("ul.methods", { role: "list" }, methods.map((method) => el("li", {}, methodRow(method))))
    : el("p.quiet-text", {}, "It has no methods, or it is disabled."));
}
