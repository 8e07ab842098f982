/**
 * Markdown of messages: the subset of CommonMark and GitHub's tables that people write in chats.
 *
 * Headings, lists, quotes, fenced code, tables and rules; no HTML, no entities, no references. A line without the mark
 * of its quote or list ends it, and line breaks stay. The result is a tree of plain objects: what becomes of it is
 * decided in `view.js`. Work and elements grow with the length of the text only, and end at a limit, behind which the
 * rest is plain text.
 */

import { piecesOf } from "../colours.js";
import { inline, wordsOf } from "./inline.js";

/** The rest of a longer message is plain text. */
export const MOST_CHARS = 65_536;
/** Elements of one message. */
export const MOST_NODES = 10_000;
/** Quotes and lists within another. */
const MOST_DEPTH = 6;
const MOST_COLUMNS = 40;

const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]{1,4})(?=\S)|\s*$| (?= ))/;
const TASK = /^\[([ xX])\] /;

/**
 * Return the blocks of a text.
 *
 * @returns {{blocks: Array<{kind: string}>, steps: number, nodes: number}} `steps` counts the work
 */
export function parse(text) {
  const work = { steps: 0, nodes: 0, get isSpent() { return this.nodes >= MOST_NODES; }, node(count = 1) { this.nodes += count; } };
  const lines = text.slice(0, MOST_CHARS).replace(/\r\n?/g, "\n").replace(/^[ \t]*\t/gm, (tabs) => tabs.replaceAll("\t", "    ")).split("\n");
  const blocks = blocksOf(lines, 0, work);
  if (text.length > MOST_CHARS) blocks.push(plain(text.slice(MOST_CHARS)));
  return { blocks, steps: work.steps, nodes: work.nodes };
}

function plain(text) {
  return { kind: "paragraph", parts: [{ kind: "text", text }] };
}

function blocksOf(lines, depth, work) {
  const blocks = [];
  let at = 0;
  work.steps += lines.reduce((sum, line) => sum + line.length + 1, 0);
  while (at < lines.length) {
    if (work.isSpent) {
      const rest = lines.slice(at).join("\n").trimEnd();
      if (rest) blocks.push(plain(rest));
      break;
    }
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth, work);
    work.node();
    work.steps += next - at;
    blocks.push(block);
    at = next;
  }
  return blocks;
}

/** The block that begins with a line, and the line behind it. */
function blockAt(lines, at, depth, work) {
  const line = lines[at];
  const fence = fenceOf(line);
  if (fence) return code(lines, at, fence, work);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, parts: inline(headingText(heading[2]), work) }, at + 1];
  if (isRule(line)) return [{ kind: "rule" }, at + 1];
  if (depth < MOST_DEPTH) {
    if (QUOTE.test(line)) return quote(lines, at, depth, work);
    const item = itemOf(line);
    if (item) return list(lines, at, item, depth, work);
  }
  const columns = tableAt(lines, at, work);
  if (columns) return table(lines, at, columns, work);
  return paragraph(lines, at, depth, work);
}

/** Whether a line begins another block than a paragraph. */
function begins(lines, at, depth, work) {
  const line = lines[at];
  return fenceOf(line) !== null || HEADING.test(line) || isRule(line)
    || (depth < MOST_DEPTH && (QUOTE.test(line) || interrupts(itemOf(line)))) || tableAt(lines, at, work) !== null;
}

/** A line of a text that begins with a number, as a year, is no list. */
function interrupts(item) {
  return item !== null && (item.start === null || item.start < 2);
}

function paragraph(lines, at, depth, work) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !begins(lines, end, depth, work)) end += 1;
  return [{ kind: "paragraph", parts: inline(lines.slice(at, end).join("\n").trim(), work) }, end];
}

function fenceOf(line) {
  const found = FENCE.exec(line);
  if (!found || (found[2][0] === "`" && found[3].includes("`"))) return null;
  return { indent: found[1].length, char: found[2][0], length: found[2].length, language: found[3].trim().split(/[\s,:{]/, 1)[0].toLowerCase().slice(0, 20) };
}

function code(lines, at, { indent, char, length, language }, work) {
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], char, length)) end += 1;
  const text = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
  const pieces = piecesOf(text, language, MOST_NODES - work.nodes);
  work.node(pieces.length);
  work.steps += text.length;
  return [{ kind: "code", language, text, pieces }, Math.min(end + 1, lines.length)];
}

function closes(line, char, length) {
  const mark = line.trim();
  return mark.length >= length && indentOf(line) < 4 && mark[0] === char && mark === char.repeat(mark.length);
}

function quote(lines, at, depth, work) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.trimStart().slice(1).replace(/^ /, ""));
  return [{ kind: "quote", blocks: blocksOf(inner, depth + 1, work) }, end];
}

/** The mark of a list's item: its indent, that of its text, and the kind of the list. */
function itemOf(line) {
  const found = ITEM.exec(line);
  if (!found) return null;
  const [, indent, mark, gap] = found;
  const isNumbered = mark.length > 1;
  return { indent: indent.length, inner: indent.length + mark.length + (gap?.length ?? 1), kind: isNumbered ? mark.at(-1) : mark, start: isNumbered ? Number(mark.slice(0, -1)) : null };
}

function list(lines, at, first, depth, work) {
  const items = [];
  let end = at;
  for (let item = first; item !== null && item.kind === first.kind && !isRule(lines[end]); item = end < lines.length ? itemOf(lines[end]) : null) {
    const next = itemEnd(lines, end, item);
    const inner = lines.slice(end, next).map((line, number) => line.slice(number ? Math.min(item.inner, indentOf(line)) : item.inner));
    const task = TASK.exec(inner[0]);
    if (task) inner[0] = `${task[1] === " " ? "☐" : "☑"} ${inner[0].slice(task[0].length)}`;
    work.node();
    work.steps += next - end;
    items.push(blocksOf(inner, depth + 1, work));
    end = next;
    if (work.isSpent) break;
  }
  return [{ kind: "list", start: first.start, items }, end];
}

/** The line behind an item: the next one that is not indented below it. */
function itemEnd(lines, at, item) {
  const least = Math.min(item.inner, item.indent + 2);
  let [end, blanks] = [at + 1, 0];
  for (; end < lines.length; end += 1) {
    if (lines[end].trim() === "") blanks += 1;
    else if (indentOf(lines[end]) >= least) blanks = 0;
    else break;
  }
  const isFollowed = end < lines.length && itemOf(lines[end])?.kind === item.kind;
  return isFollowed ? end : end - blanks;
}

/** The alignment of each column if a table begins with a line; else null. */
function tableAt(lines, at, work) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !/[-:|]/.test(lines[at + 1].trimStart()[0] ?? "")) return null;
  const marks = cells(lines[at + 1], work);
  if (marks.length > MOST_COLUMNS || !marks.every((one) => /^:?-+:?$/.test(one)) || cells(lines[at], work).length !== marks.length) return null;
  return marks.map((one) => one.endsWith(":") ? (one.startsWith(":") ? "center" : "right") : null);
}

/** A table; cells that a row does not have stay away, those that it has too many are its last one's. */
function table(lines, at, align, work) {
  const rows = [];
  let end = at;
  for (; end < lines.length && lines[end].includes("|") && !work.isSpent; end += 1) {
    if (end === at + 1) continue;
    const row = cells(lines[end], work).slice(0, MOST_COLUMNS);
    work.node(row.length + 1);
    rows.push(row.map((cell) => inline(cell, work)));
  }
  return [{ kind: "table", align, head: rows[0], rows: rows.slice(1) }, Math.max(end, at + 2)];
}

function cells(line, work) {
  work.steps += line.length;
  const found = [];
  let text = line.trim();
  if (text.startsWith("|")) text = text.slice(1);
  let begin = 0;
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "|") {
      found.push(text.slice(begin, at));
      begin = at + 1;
    }
  }
  if (begin < text.length) found.push(text.slice(begin));
  return found.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** The text of a heading without the marks that close it. */
function headingText(text) {
  const trimmed = text.trim();
  let end = trimmed.length;
  while (end > 0 && trimmed[end - 1] === "#") end -= 1;
  return end === 0 || trimmed[end - 1] === " " ? trimmed.slice(0, end).trimEnd() : trimmed;
}

function isRule(line) {
  const text = line.replace(/[ \t]/g, "");
  return text.length >= 3 && "-*_".includes(text[0]) && text === text[0].repeat(text.length) && indentOf(line) < 4;
}

function indentOf(line) {
  let at = 0;
  while (line[at] === " ") at += 1;
  return at;
}

/** The words of blocks on one line, without marks and code. */
export function lineOf(blocks) {
  return blocks.map(wordsOfBlock).filter(Boolean).join(" ");
}

function wordsOfBlock(block) {
  switch (block.kind) {
    case "heading":
    case "paragraph": return wordsOf(block.parts);
    case "quote": return lineOf(block.blocks);
    case "list": return block.items.map(lineOf).join(" ");
    case "table": return [block.head, ...block.rows].flat().map(wordsOf).join(" ");
    default: return "";
  }
}
