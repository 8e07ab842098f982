/** The link to the turn's OpenTelemetry trace, if the gateway has an address for it. */

import { el } from "../../lib/dom.js";
import { icon } from "../../lib/icons.js";

export function traceLink(turn) {
  if (turn.trace_url) return el("a.with-icon", { href: turn.trace_url, target: "_blank", rel: "noreferrer" }, "Trace", icon("external"));
  return turn.trace_id ? el("span", {}, "Trace ", el("span.mono", {}, turn.trace_id)) : null;
}
