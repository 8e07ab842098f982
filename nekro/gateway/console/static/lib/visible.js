/**
 * Texts of others as people see them: what has no glyph is written as an escape, as `nekro_agent.tools.visible_text`
 * does on the other side. Emoji, and words whose letters need a joiner, stay as they are.
 */

/** Letters and symbols without ink that are no ignorable characters. */
const BLANK = "\\u2800\\u2d7f\\u{16fe4}\\u{1d159}\\u{13441}\\u{13442}";
const JOINERS = "\\u180b-\\u180d\\u180f\\u200c\\u200d\\ufe00-\\ufe0f";
const CLASS = `[\\p{Default_Ignorable_Code_Point}\\p{C}\\p{Zl}\\p{Zp}${BLANK}]`;
const HIDDEN = `(?![${JOINERS}\\t\\n\\r])${CLASS}`;
const RUN = new RegExp(`${HIDDEN}[${JOINERS}]*|[${JOINERS}]+`, "gu");
const EVERY = new RegExp(CLASS, "gu");
/** Joiners that may appear alone: a single one, or the pair used in emoji. Longer runs can hide data. */
const ONE_JOINER = new RegExp(`^(?:[${JOINERS}]|\\ufe0f\\u200d)$`, "u");
const KEYCAP = "\u20e3";

/** Return a text without invisible characters: they are escaped. */
export function visible(text) {
  return text.replace(RUN, (run, at) => joins(run, at, text) ? run : escaped(run));
}

/** Return a JSON text in which every invisible character of a string is escaped; its value is the same. */
export function visibleJson(text) {
  return text.replace(EVERY, (one) => /[\t\n\r]/.test(one) ? one : one.split("").map(unit).join(""));
}

/** Whether a joiner is legitimate: after a character that is not ASCII, or in a keycap. */
function joins(run, at, text) {
  if (!ONE_JOINER.test(run) || at === 0) return false;
  return text.charCodeAt(at - 1) > 0x7f || text[at + run.length] === KEYCAP;
}

function escaped(run) {
  return Array.from(run, (one) => {
    const code = one.codePointAt(0);
    if (code > 0xffff) return `\\U${code.toString(16).padStart(8, "0")}`;
    return code > 0xff ? unit(one) : `\\x${code.toString(16).padStart(2, "0")}`;
  }).join("");
}

/** Return the escape of one UTF-16 code unit. */
function unit(one) {
  return `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`;
}
