/** Markdown as elements. Each kind of part has one line here; there is none for markup, pictures or scripts. */

import { el } from "../dom.js";
import { copyButton } from "../widgets.js";
import { parse } from "./blocks.js";

const LAST_LEVEL = 6;

/**
 * The words of an agent.
 *
 * @param {number} level of its first heading; others follow without a gap
 */
export function markdownView(text, { level = 2 } = {}) {
  const context = { heading: headingLevels(level) };
  return el("div.markdown", {}, parse(text).blocks.map((block) => blockView(block, context)));
}

function blockView(block, context) {
  const inner = (blocks) => blocks.map((one) => blockView(one, context));
  switch (block.kind) {
    case "heading": return el(`h${context.heading(block.level)}.markdown-heading`, {}, parts(block.parts));
    case "list": return el(block.start === null ? "ul" : "ol", { start: block.start }, block.items.map((item) => el("li", {}, inner(item))));
    case "quote": return el("blockquote", {}, inner(block.blocks));
    case "rule": return el("hr");
    case "code": return codeBlock(block);
    case "table": return table(block);
    default: return el("p.message-text", {}, parts(block.parts));
  }
}

function parts(list) {
  return list.map((part) => {
    switch (part.kind) {
      case "text": return part.text;
      case "code": return el("code", {}, part.text);
      case "link": return link(part);
      default: return el(part.kind, {}, parts(part.parts));
    }
  });
}

function link({ href, parts: words }) {
  return el("a", { href, title: href, target: href.startsWith("mailto:") ? null : "_blank", rel: "noopener noreferrer nofollow" }, parts(words));
}

function codeBlock({ text, pieces }) {
  return el("div.code-frame", {},
    el("pre.message-code", { tabindex: "0", role: "group", aria: { label: "Code in the message" } }, el("code", {}, pieces.map(([piece, kind]) => kind ? el(`span.${kind}`, {}, piece) : piece))),
    copyButton(text, "Copy the code"));
}

function table({ align, head, rows }) {
  const cell = (tag) => (words, at) => el(words.length ? tag : "td", { data: { align: align[at] ?? "left" }, scope: tag === "th" && words.length ? "col" : null }, parts(words));
  return el("div.markdown-table", { tabindex: "0", role: "group", aria: { label: "Table in the message" } },
    el("table", {}, el("thead", {}, el("tr", {}, head.map(cell("th")))), rows.length ? el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell("td"))))) : null));
}

/** Levels of headings: the first is `base`, and none is more than one below the one before it. */
function headingLevels(base) {
  const open = [];
  return (level) => {
    while (open.length && open.at(-1) >= level) open.pop();
    open.push(level);
    return Math.min(base + open.length - 1, LAST_LEVEL);
  };
}
