/** Messages as people saw them: text, pictures, files. Used on turn and chat pages. */

import { el } from "./dom.js";
import { bytes, clock } from "./format.js";
import { icon } from "./icons.js";
import { lineOf, parse } from "./markdown/blocks.js";
import { markdownView } from "./markdown/view.js";
import { fold, time } from "./widgets.js";

/** Pictures that browsers draw without running anything of theirs; others are offered as files. */
const DRAWN = new Set(["image/png", "image/jpeg", "image/gif", "image/webp", "image/avif", "image/bmp"]);
/** Fenced code in a text, as people write it. */
const FENCE = /```[\w+-]*\n?([\s\S]*?)(?:```|$)/g;

/**
 * One message. Notices and results for the agent, which people do not see, are folded. Words of the agent are
 * Markdown; those of people are shown as they were written.
 *
 * @param {number} options.level of the first heading in it
 */
export function messageView(message, { agent = "Agent", level = 2 } = {}) {
  if (message.kind === "system") return notice(message);
  const isPerson = message.kind === "user";
  const name = isPerson ? message.sender_name || message.sender_id || "Person" : agent;
  return el("article.message", { class: isPerson ? "from-person" : "from-agent", data: { message: message.id }, aria: { label: `${name}, ${clock(message.created_at)}` } },
    el("header", {}, el("span.message-name", {}, name), time(message.created_at)),
    el("div.message-body", {}, bodyOf(message, isPerson ? textOf : (text) => markdownView(text, { level }))));
}

function notice(message) {
  const source = message.plugin ? `Note to the agent from ${message.plugin}` : "Note to the agent";
  return fold([source, el("span.quiet-text", {}, clock(message.created_at))],
    () => el("div.notice-text", {}, textOf(message.text)), { class: "notice", data: { message: message.id } });
}

function bodyOf(message, wordsView) {
  const parts = message.parts?.length ? message.parts : [{ type: "text", text: message.text }];
  return parts.map((part) => part.type === "text" ? (part.text ? wordsView(part.text) : null) : fileView(part.file, part.type === "image"));
}

/** A text; fenced code is set in a fixed width. */
export function textOf(text) {
  const found = [];
  let end = 0;
  for (const fence of text.matchAll(FENCE)) {
    found.push(paragraph(text.slice(end, fence.index)), el("pre.message-code", { tabindex: "0", role: "group", aria: { label: "Code in the message" } }, fence[1].replace(/\n$/, "")));
    end = fence.index + fence[0].length;
  }
  return [...found, paragraph(text.slice(end))];
}

/** A text without its fenced code. */
export function withoutCode(text) {
  return text.replace(FENCE, " ").trim();
}

/** A message on one line, without code and without the marks of Markdown if the agent wrote it. */
export function lineOfMessage(message) {
  return message.kind === "user" ? withoutCode(message.text) : lineOf(parse(message.text).blocks);
}

function paragraph(text) {
  const trimmed = text.replace(/^\n+/, "").trimEnd();
  return trimmed ? el("p.message-text", {}, trimmed) : null;
}

/** A file: pictures are shown, all can be downloaded. */
export function fileView(file, isImage) {
  const link = el("a.file", { href: file.url, download: file.name },
    icon("file"), el("span.file-name", {}, file.name), el("span.quiet-text", {}, bytes(file.size_bytes)));
  if (!isImage || !DRAWN.has(file.media_type)) return link;
  const picture = el("img", { src: file.url, alt: `Picture ${file.name}`, loading: "lazy", decoding: "async" });
  const figure = el("figure.picture", {}, el("a", { href: file.url, target: "_blank", rel: "noreferrer", aria: { label: `Open the picture ${file.name}` } }, picture),
    el("figcaption", {}, file.name, " ", el("span.quiet-text", {}, bytes(file.size_bytes))));
  picture.addEventListener("error", () => figure.replaceWith(link), { once: true });
  return figure;
}
