/** Servers of the Model Context Protocol: state, tools, declaration, trial. */

import { get, path, post, put, remove } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { several } from "../lib/format.js";
import { href } from "../lib/router.js";
import { jsonOf } from "../lib/schema_form.js";
import { badge } from "../lib/states.js";
import { textView, valueView } from "../lib/values.js";
import { acting, ask, button, empty, factRow, field, fold, loaded, pageHead, say, time } from "../lib/widgets.js";

export const title = "MCP servers";
const EXAMPLE = '{\n  "command": "mcp-server-time",\n  "args": []\n}';

export function show(place, { signal }) {
  const list = el("div");
  const trials = new Map();
  /** Where a trial of a server is shown; it stays when the list is read again. */
  const trialOf = ({ name }) => trials.get(name) ?? trials.set(name, el("div", { role: "status" })).get(name);
  fill(place, pageHead({ title, lead: "Each server is a plugin; its tools are methods.", actions: [button("Add a server", acting(() => declare(null, () => again({ quietly: true }))), { kind: "primary" })] }), list);
  const again = loaded(list, async () => {
    const { items } = await get("/mcp/servers", {}, signal);
    if (!items.length) return empty("No servers yet", "A server gives the agent tools of other programs.");
    return el("div.page", {}, items.map((server) => card(server, trialOf(server), () => again({ quietly: true }))));
  }, { signal });
  // The state of a server is that of its plugin.
  whenChanged(["mcp_servers", "plugins"], () => again({ quietly: true }), { signal });
}

function card(server, trial, onChange) {
  const isOwn = server.source === "database";
  return el("section.card", { aria: { label: server.name }, data: { server: server.name } },
    el("div.split", {}, el("h2", {}, server.name), badge(server.status)),
    factRow([server.transport, server.server || null, server.protocol ? ["Protocol", server.protocol] : null, several(server.tools.length, "tool"), isOwn ? null : "declared in a file",
      server.listed_at ? ["Listed", time(server.listed_at)] : null, el("a", { href: href("/plugins", server.plugin) }, "Plugin")]),
    server.error ? textView(server.error, "Error") : null,
    server.tools.length ? fold("Tools", () => el("ul.tags", { role: "list" }, server.tools.map((tool) => el("li.tag.mono", {}, tool))), { data: { key: `tools-${server.name}` } }) : null,
    server.notes.length ? fold(several(server.notes.length, "note"), () => notesView(server.notes), { data: { key: `notes-${server.name}` } }) : null,
    fold("Declaration", () => valueView(server.declaration, "Declaration"), { data: { key: `declaration-${server.name}` } }),
    el("div.row", {},
      button("Test", acting(async () => {
        fill(trial, el("p.quiet-text", {}, "Connecting…"));
        const found = await post(`${path("/mcp/servers", server.name)}/test`).finally(() => fill(trial));
        fill(trial, trialView(found));
      }), { kind: "small", label: `Test ${server.name}`, data: { key: `test-${server.name}` } }),
      isOwn ? button("Edit", acting(() => declare(server, onChange)), { kind: "small", label: `Edit ${server.name}`, data: { key: `edit-${server.name}` } }) : null,
      isOwn ? button(server.status === "disabled" ? "Enable" : "Disable", acting(async () => {
        await put(path("/mcp/servers", server.name), { declaration: server.declaration, is_enabled: server.status === "disabled" });
        onChange();
      }), { kind: "small", label: `${server.status === "disabled" ? "Enable" : "Disable"} ${server.name}`, data: { key: `able-${server.name}` } }) : null,
      isOwn ? button("Remove", acting(async () => {
        if (!await ask({ title: `Remove ${server.name}?`, content: el("p", {}, "Its tools are no longer available."), confirm: "Remove", danger: true })) return;
        await remove(path("/mcp/servers", server.name));
        say("Removed.");
        onChange();
      }), { kind: "small danger", label: `Remove ${server.name}`, data: { key: `remove-${server.name}` } }) : null),
    trial);
}

function trialView(trial) {
  if (trial.error) return el("div.form", {}, el("div.banner", { data: { tone: "bad" } }, "It does not work."), textView(trial.error, "Error"));
  return el("div.form", {}, el("div.banner", {}, `It works: ${several(trial.tools.length, "tool")}.`),
    el("ul.form", { role: "list" }, trial.tools.map((tool) => el("li.row", {}, el("code", {}, `${tool.name}${tool.signature}`), tool.requires_approval ? el("span.tag", {}, "needs approval") : null, tool.runs_once ? el("span.tag", {}, "runs once") : null))),
    trial.notes.length ? notesView(trial.notes) : null);
}

/** What is wrong with tools of a server; those that are left out cannot be called. */
function notesView(notes) {
  return el("ul.form", { role: "list", aria: { label: "Notes on tools" } }, notes.map((note) => el("li.row", {},
    note.tool ? el("code", {}, note.tool) : null, el("span", {}, note.reason), note.is_left_out ? el("span.tag", {}, "left out") : null)));
}

async function declare(server, onChange) {
  const name = el("input", { required: true, value: server?.name ?? "", readOnly: server !== null, autocomplete: "off", pattern: "[A-Za-z0-9_\\-]+" });
  const declaration = el("textarea.mono", { rows: "10", required: true, spellcheck: "false", value: server ? JSON.stringify(server.declaration, null, 2) : EXAMPLE });
  const saved = await ask({
    title: server ? `Edit ${server.name}` : "Add a server",
    wide: true,
    content: [field("Name", name), field("Declaration", declaration, { hint: "As an entry of mcp.json: command and args, or url and headers." })],
    confirm: "Save",
    read: () => put(path("/mcp/servers", name.value.trim()), { declaration: jsonOf(declaration.value, "Declaration"), is_enabled: server?.status !== "disabled" }),
  });
  if (saved) onChange();
}
