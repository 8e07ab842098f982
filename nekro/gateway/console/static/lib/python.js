/** Code with line numbers and quiet colours. The text is cut into spans; none of it is interpreted. */

import { piecesOf } from "./colours.js";
import { el } from "./dom.js";

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
  for (const [text, kind] of piecesOf(code, "python")) put(text, kind);
  return lines;
}
