/**
 * Markdown within a paragraph: code, emphasis, links, line breaks. The result is a tree of plain objects.
 *
 * Each character is read a bounded number of times, whatever the text is: marks that may still find a partner wait on
 * stacks of limited height, and the partners of backticks and parentheses are found beforehand in one pass.
 */

import { linkTarget } from "./links.js";

/** Marks that wait for their partner; the oldest is given up. It bounds how deep elements nest. */
const MOST_OPEN = 12;
/** Parentheses within each other in an address; each character of a text is in so many addresses at most. */
const MOST_PARENTHESES = 8;
/** Longer runs of emphasis marks are text. */
const MOST_MARKS = 3;
const PLAIN = /[^\\`*_~[\]!<h]+/y;
const RUN = /([*_~])\1*/y;
const TICKS = /`+/g;
const BREAK = /<br\s?\/?>/iy;
const BARE = /https?:\/\/[^\s<>"`*[\]，。、；：！？（）「」『』【】《》]+/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const TITLE = /[ \t]+(?:"[^"\n]{0,200}"|'[^'\n]{0,200}')[ \t]*\)/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const TAGS = { 1: "em", 2: "strong" };

/**
 * Return the parts of a text.
 *
 * @param {string} text
 * @param {object} work counts `steps`, and gives `node()` while the message may have more elements
 * @returns {Array<{kind: string}>} {kind: "text", text}, {kind: "code", text}, {kind: "link", href, parts} and
 *   {kind: "em" | "strong" | "del", parts}
 */
export function inline(text, work) {
  return new Inline(text, work).parts();
}

/** The text of parts without their marks. */
export function wordsOf(parts) {
  return parts.map((part) => part.parts ? wordsOf(part.parts) : part.text).join("");
}

class Inline {
  constructor(text, work) {
    Object.assign(this, { text, work, at: 0, out: [], pending: "", marks: [], brackets: [] });
    this.ticks = ticksOf(text);
    this.closing = text.includes("](") ? parenthesesOf(text) : null;
    work.steps += text.length;
  }

  parts() {
    const { text, work } = this;
    while (this.at < text.length) {
      work.steps += 1;
      if (work.isSpent) {
        this.pending += text.slice(this.at);
        break;
      }
      this.one(text[this.at]);
    }
    this.flush();
    return joined(this.out);
  }

  one(char) {
    if (char === "\\") return this.escape();
    if (char === "`") return this.code();
    if (char === "*" || char === "_" || char === "~") return this.emphasis();
    if (char === "[") return this.open(1);
    if (char === "!" && this.text[this.at + 1] === "[") return this.open(2);
    if (char === "]") return this.close();
    if (char === "<") return this.angle();
    if (char === "h") return this.bare();
    return this.plain(this.matched(PLAIN)?.[0] ?? char);
  }

  plain(piece) {
    this.pending += piece;
    this.at += piece.length;
  }

  matched(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  flush() {
    if (this.pending) this.out.push({ kind: "text", text: this.pending });
    this.pending = "";
  }

  push(part, length) {
    this.flush();
    this.work.node();
    this.out.push(part);
    this.at += length;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === undefined || !PUNCTUATION.test(next)) return this.plain("\\");
    this.pending += next;
    this.at += 2;
  }

  code() {
    // A run whose first backtick is escaped begins within one.
    const { length, end } = this.ticks.get(this.at) ?? { length: 1, end: null };
    if (end === null) return this.plain("`".repeat(length));
    const inner = this.text.slice(this.at + length, end).replace(/\n/g, " ");
    const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    this.push({ kind: "code", text: isPadded ? inner.slice(1, -1) : inner }, end + length - this.at);
  }

  angle() {
    const line = this.matched(BREAK);
    if (line) {
      this.pending += "\n";
      this.at += line[0].length;
      return;
    }
    const found = this.matched(ANGLE);
    const href = found && linkTarget(found[1]);
    if (!href) return this.plain("<");
    this.push({ kind: "link", href, parts: [{ kind: "text", text: found[1] }] }, found[0].length);
  }

  bare() {
    const found = WORD.test(this.text[this.at - 1] ?? " ") ? null : this.matched(BARE);
    if (!found) return this.plain("h");
    const shown = withoutEnd(found[0]);
    const href = linkTarget(shown);
    if (!href) return this.plain(found[0]);
    this.push({ kind: "link", href, parts: [{ kind: "text", text: shown }] }, shown.length);
  }

  /** A run of marks closes what is open, as far as it can, and may open with the rest. */
  emphasis() {
    const { text } = this;
    const [run, char] = this.matched(RUN);
    const isMark = char === "~" ? run.length === 2 : run.length <= MOST_MARKS;
    if (!isMark) return this.plain(run);
    const [before, after] = [text[this.at - 1] ?? " ", text[this.at + run.length] ?? " "];
    const isWithinWord = char === "_" && WORD.test(before) && WORD.test(after);
    const canClose = !/\s/.test(before) && !isWithinWord;
    const canOpen = !/\s/.test(after) && !isWithinWord;
    this.flush();
    let count = run.length;
    if (canClose) count = this.closeMarks(char, count);
    this.at += run.length;
    if (!count) return;
    if (!canOpen) {
      this.pending += char.repeat(count);
      return;
    }
    const node = { kind: "text", text: char.repeat(count) };
    this.marks.push({ char, count, node, at: this.out.push(node) - 1 });
    if (this.marks.length > MOST_OPEN) this.marks.shift();
  }

  closeMarks(char, wanted) {
    let count = wanted;
    while (count) {
      const found = this.marks.findLastIndex((mark) => mark.char === char);
      this.work.steps += this.marks.length;
      if (found < 0) return count;
      const mark = this.marks[found];
      const used = Math.min(mark.count, count, 2);
      const marked = this.out.splice(mark.at + 1);
      // Nothing is marked: "**" beside "**" is text.
      if (!marked.length) return count;
      this.work.steps += marked.length;
      this.work.node();
      this.marks.length = found + 1;
      this.brackets = this.brackets.filter((one) => one.at <= mark.at);
      mark.count -= used;
      mark.node.text = char.repeat(mark.count);
      this.out.push({ kind: char === "~" ? "del" : TAGS[used], parts: joined(marked) });
      if (!mark.count) this.marks.pop();
      count -= used;
    }
    return count;
  }

  open(length) {
    const mark = this.text.slice(this.at, this.at + length);
    this.flush();
    this.brackets.push({ isPicture: length === 2, at: this.out.push({ kind: "text", text: mark }) - 1 });
    if (this.brackets.length > MOST_OPEN) this.brackets.shift();
    this.at += length;
  }

  close() {
    const bracket = this.brackets.pop();
    const target = bracket && this.text[this.at + 1] === "(" ? this.target(this.at + 1) : null;
    if (!target) return this.plain("]");
    this.flush();
    this.marks = this.marks.filter((mark) => mark.at < bracket.at);
    const inner = this.out.splice(bracket.at).slice(1);
    this.work.steps += inner.length;
    const words = joined(unlinked(inner, this.work));
    // A picture of another host is not loaded: its place has a link to it.
    const parts = bracket.isPicture ? [{ kind: "text", text: `Picture: ${wordsOf(words) || target.href}` }]
      : words.length ? words : [{ kind: "text", text: target.href }];
    if (!bracket.isPicture) this.brackets = this.brackets.filter((one) => one.isPicture);
    this.push({ kind: "link", href: target.href, parts }, target.end - this.at);
  }

  /** The address in parentheses that begin at a place, and where they end. */
  target(begin) {
    const { end, close } = this.closing.get(begin) ?? {};
    if (end === undefined) return null;
    let stop = close === null ? null : close + 1;
    if (stop === null) {
      TITLE.lastIndex = end;
      this.work.steps += 1;
      if (!TITLE.test(this.text)) return null;
      stop = TITLE.lastIndex;
    }
    let address = this.text.slice(begin + 1, close ?? end);
    if (address.startsWith("<") && address.endsWith(">")) address = address.slice(1, -1);
    this.work.steps += Math.min(address.length, 2048);
    const href = linkTarget(address);
    return href ? { href, end: stop } : null;
  }
}

/** The same parts, with each run of texts as one. */
function joined(parts) {
  const found = [];
  for (const part of parts) {
    const last = found.at(-1);
    if (part.kind !== "text") found.push(part);
    else if (last?.kind === "text") last.text += part.text;
    else if (part.text) found.push({ ...part });
  }
  return found;
}

/** Links do not nest: those within a link become their words. */
function unlinked(parts, work) {
  return parts.flatMap((part) => {
    work.steps += 1;
    if (part.kind === "link") return unlinked(part.parts, work);
    return part.parts ? [{ ...part, parts: unlinked(part.parts, work) }] : [part];
  });
}

/** An address without the punctuation of the sentence behind it. */
function withoutEnd(address) {
  let extra = address.split(")").length - address.split("(").length;
  let end = address.length;
  for (; end > 0; end -= 1) {
    const last = address[end - 1];
    if (last === ")" && extra > 0) extra -= 1;
    else if (!/[.,;:!?'_~]/.test(last)) break;
  }
  return address.slice(0, end);
}

/** Where the run of as many backticks begins that closes each run; null without one. */
function ticksOf(text) {
  const [found, next] = [new Map(), new Map()];
  for (const run of [...text.matchAll(TICKS)].reverse()) {
    const length = run[0].length;
    found.set(run.index, { length, end: next.get(length) ?? null });
    next.set(length, run.index);
  }
  return found;
}

/** For each opening parenthesis where its address ends, and its partner if that is within the same word. */
function parenthesesOf(text) {
  const found = new Map();
  let open = [];
  for (let at = 0; at <= text.length; at += 1) {
    const char = text[at];
    if (char === undefined || /\s/.test(char)) {
      // Only the innermost can be an address that a title follows.
      if (open.length) found.set(open.at(-1), { end: at, close: null });
      open = [];
    } else if (char === "\\") {
      at += 1;
    } else if (char === "(") {
      if (open.push(at) > MOST_PARENTHESES) open.shift();
    } else if (char === ")" && open.length) found.set(open.pop(), { end: at, close: at });
  }
  return found;
}
