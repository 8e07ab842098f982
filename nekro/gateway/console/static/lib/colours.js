/** Cuts code into pieces with quiet colours: Python, JSON and shell. None of it is interpreted. */

const MOST_COLOURED = 200_000;
const words = (text) => new Set(text.split(" "));
const PYTHON = {
  /** Strings over several lines are found first, then the rest token by token. */
  token: /([rbfuRBFU]{0,2}(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))|(#[^\n]*)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g,
  keywords: words("False None True and as assert async await break class continue def del elif else except finally for from global if "
    + "import in is lambda match nonlocal not or pass raise return try while with yield case"),
};
const JSON_TEXT = {
  token: /("(?:\\.|[^"\\\n])*"?)|(\/\/[^\n]*)|(-?\b\d[\w.+-]*)|([A-Za-z_]\w*)/g,
  keywords: words("true false null"),
};
const SHELL = {
  token: /("(?:\\[\s\S]|[^"\\])*"?|'[^']*'?)|((?<![^\s;|&(])#[^\n]*)|((?<![\w./-])\d+\b)|([A-Za-z_][\w./-]*)/g,
  keywords: words("if then else elif fi for while until do done case esac in function return exit export local set unset cd echo sudo"),
};
const LANGUAGES = new Map([
  ...["python", "py", "python3", "ipython"].map((name) => [name, PYTHON]),
  ...["json", "jsonc", "json5", "jsonl"].map((name) => [name, JSON_TEXT]),
  ...["sh", "bash", "shell", "zsh", "console", "shell-session"].map((name) => [name, SHELL]),
]);

/**
 * Return the pieces of a code in order, as [text, class or null]; together they are the code.
 *
 * @param {number} most coloured pieces; the rest is one piece
 */
export function piecesOf(code, language, most = Infinity) {
  const rules = LANGUAGES.get(language);
  if (!rules || code.length > MOST_COLOURED) return code ? [[code, null]] : [];
  const pieces = [];
  let end = 0;
  for (const found of code.matchAll(rules.token)) {
    const kind = kindOf(found, rules.keywords);
    if (kind === null) continue;
    if (pieces.length + 2 > most) break;
    if (found.index > end) pieces.push([code.slice(end, found.index), null]);
    pieces.push([found[0], kind]);
    end = found.index + found[0].length;
  }
  if (end < code.length) pieces.push([code.slice(end), null]);
  return pieces;
}

function kindOf([text, string, comment, number], keywords) {
  if (string !== undefined) return "tok-string";
  if (comment !== undefined) return "tok-comment";
  if (number !== undefined) return "tok-number";
  return keywords.has(text) ? "tok-keyword" : null;
}
