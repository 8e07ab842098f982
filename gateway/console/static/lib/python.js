/** Code with line numbers and quiet colours. The text is cut into spans; none of it is interpreted. */

import { el } from "./dom.js";

const KEYWORDS = new Set(("False None True and as assert async await break class continue def del elif else except finally for from global if "
  + "import in is lambda match nonlocal not or pass raise return try while with yield case").split(" "));
/** Strings over several lines are found first, then the rest token by token. */
const TOKEN = /([rbfuRBFU]{0,2}(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))|(#[^\n]*)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;
const MOST_COLOURED = 200_000;

/**
 * A view of code. `mark(lines)` highlights the lines that run now.
 *
 * @returns {{node: HTMLElement, mark: function(Set<number>): void}}
 */
export function codeView(code, { label = "Code" } = {}) {
  const lines = linesOf(code);
  const rows = lines.map((spans, at) => el("li.code-line", { data: { line: at + 1 } }, el("code", {}, spans)));
  const node = el("ol.code", { tabindex: "0", role: "list", aria: { label }, style: { "--digits": String(String(lines.length).length) } }, rows);
  return {
    node,
    mark(wanted) {
      rows.forEach((row, at) => {
        const runs = wanted.has(at + 1);
        row.classList.toggle("runs", runs);
        if (runs) row.setAttribute("aria-current", "step");
        else row.removeAttribute("aria-current");
      });
    },
  };
}

function linesOf(code) {
  const lines = [[]];
  const put = (text, kind) => text.split("\n").forEach((piece, at) => {
    if (at) lines.push([]);
    if (piece) lines.at(-1).push(kind ? el(`span.${kind}`, {}, piece) : piece);
  });
  if (code.length > MOST_COLOURED) {
    put(code, null);
    return lines;
  }
  let end = 0;
  for (const found of code.matchAll(TOKEN)) {
    put(code.slice(end, found.index), null);
    put(found[0], kindOf(found));
    end = found.index + found[0].length;
  }
  put(code.slice(end), null);
  return lines;
}

function kindOf([text, string, comment, number]) {
  if (string !== undefined) return "tok-string";
  if (comment !== undefined) return "tok-comment";
  if (number !== undefined) return "tok-number";
  return KEYWORDS.has(text) ? "tok-keyword" : null;
}
