/** The plugins that the workers serve. */

import { get } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { short } from "../lib/format.js";
import { icon } from "../lib/icons.js";
import { href } from "../lib/router.js";
import { badge } from "../lib/states.js";
import { empty, loaded, pageHead } from "../lib/widgets.js";

export const title = "Plugins";

export function show(place, { signal }) {
  const list = el("div");
  let all = [];
  const search = el("input", { type: "search", placeholder: "Search plugins", aria: { label: "Search plugins" }, on: { input: () => draw() } });
  fill(place, pageHead({ title, lead: "What the workers can do, and how it is set up." }),
    el("div.toolbar", {}, el("div.search", {}, icon("search"), search)), list);
  const results = el("div");
  const again = loaded(list, async () => {
    all = (await get("/plugins", {}, signal)).items;
    draw();
    return results;
  }, { signal });
  whenChanged(["plugins"], () => again({ quietly: true }), { signal });

  function draw() {
    const text = search.value.trim().toLowerCase();
    const found = all.filter((one) => !text || `${one.key} ${one.name} ${one.description}`.toLowerCase().includes(text));
    fill(results, found.length ? el("ul.list", { role: "list" }, found.map(row)) : empty(all.length ? "Nothing found" : "No plugins", all.length ? "" : "No worker has published a plugin yet."));
  }
}

function row(plugin) {
  return el("li", {}, el("a.list-link", { href: href("/plugins", plugin.key), data: { key: plugin.key } },
    el("span.list-main", {},
      el("span.list-title", {}, plugin.name || plugin.key, " ", el("span.quiet-text.mono", {}, plugin.key)),
      el("span.list-text", {}, plugin.error ? short(plugin.error, 160) : plugin.description)),
    el("span.list-side", {}, badge(plugin.status), plugin.version ? `version ${plugin.version}` : null)));
}
