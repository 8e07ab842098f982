/** A chart over time: bars or lines as a drawing, with a legend and the same figures as a table. */

import { el, svg } from "./dom.js";
import { fold, nextId, table } from "./widgets.js";

const HEIGHT = 100;
/** Of an interval, beside its bar. */
const GAP = 0.12;
const SECOND = 1_000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
/** Ends of an axis of milliseconds, whose halves are round too. */
const LENGTHS = [10, 20, 50, 100, 200, 500, SECOND, 2 * SECOND, 4 * SECOND, 10 * SECOND, 20 * SECOND, 40 * SECOND, MINUTE,
  2 * MINUTE, 4 * MINUTE, 10 * MINUTE, 20 * MINUTE, 40 * MINUTE, HOUR, 2 * HOUR, 4 * HOUR, 10 * HOUR, 24 * HOUR];

/** The smallest round number that is at least as large, and whose half is round. */
export function roundUp(number) {
  const size = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 4, 6, 8, 10].find((step) => step * size >= number * (1 - 1e-9)) * size;
}

/** The same for milliseconds. */
export function roundUpLength(milliseconds) {
  return LENGTHS.find((length) => length >= milliseconds) ?? Math.ceil(milliseconds / (24 * HOUR)) * 24 * HOUR;
}

/**
 * A chart with its title.
 *
 * @param {string} title of the chart, also that of its table
 * @param {object} options columns: what is shown, as {name, tone, of(point)}, null where there is none;
 *   points; labelOf(point): the interval as people read it; format(number); intervalName: head of the table's
 *   first column; isLines: lines instead of bars upon each other; round(number): end of the axis
 */
export function chart(title, { columns, points, labelOf, format, intervalName, isLines = false, round = roundUp }) {
  const figures = points.map((point) => columns.map((column) => column.of(point)));
  const heights = figures.map((values) => isLines ? Math.max(0, ...values.map((value) => value ?? 0)) : values.reduce((sum, value) => sum + (value ?? 0), 0));
  const most = Math.max(0, ...heights);
  const top = most > 0 ? round(most) : 1;
  const words = (at) => `${labelOf(points[at])}: ${columns.map(({ name }, one) => `${name} ${format(figures[at][one])}`).join(", ")}`;
  const drawn = isLines ? lines(figures, columns, top) : bars(figures, columns, top);
  const hits = points.map((_, at) => svg("rect", { x: at, y: 0, width: 1, height: HEIGHT, class: "chart-hit" }, svg("title", {}, words(at))));
  const highest = heights.indexOf(most);
  const summary = most > 0 ? `${title}, highest at ${words(highest)}. The table below has all figures.` : `${title}: no figures in this time.`;
  const id = nextId("chart");
  const busy = points.filter((_, at) => figures[at].some((value) => value)).reverse();
  return el("section.card.chart", { aria: { labelledby: id }, data: { chart: title } },
    el("div.chart-head", {}, el("h2", { id }, title),
      columns.length > 1 ? el("ul.legend", { role: "list" }, columns.map(({ name, tone }) => el("li", {}, el(`span.legend-mark.tone-${tone}`, { aria: { hidden: true } }), name))) : null),
    el("div.chart-frame", {},
      el("div.chart-scale", { aria: { hidden: true } }, [top, top / 2].map((value) => el("span", {}, most > 0 ? format(value) : "")), el("span", {}, "0")),
      svg("svg", { class: "chart-plot", viewBox: `0 0 ${points.length} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": summary },
        [0, HEIGHT / 2, HEIGHT].map((y) => svg("path", { d: `M0 ${y}H${points.length}`, class: "chart-grid" })), drawn, hits),
      el("div.chart-times", { aria: { hidden: true } }, ends(points).map((point) => el("span", {}, labelOf(point))))),
    busy.length ? fold("Table", () => table(title, [
      { title: intervalName, cell: labelOf },
      ...columns.map(({ name, of }) => ({ title: name, class: "number", cell: (point) => format(of(point)) })),
    ], busy, { isSmall: true }), { data: { key: `table of ${title}` } }) : null);
}

function bars(figures, columns, top) {
  return figures.flatMap((values, at) => {
    let below = 0;
    return values.map((value, one) => {
      const height = ((value ?? 0) / top) * HEIGHT;
      below += height;
      return height > 0 ? svg("rect", { x: at + GAP, y: HEIGHT - below, width: 1 - 2 * GAP, height, class: `chart-bar tone-${columns[one].tone}` }) : null;
    });
  });
}

/** A line per column; it is broken where there is no figure. */
function lines(figures, columns, top) {
  return columns.map(({ tone }, one) => {
    let isBroken = true;
    const path = figures.map((values, at) => {
      const value = values[one];
      if (value === null || value === undefined) { isBroken = true; return ""; }
      const [x, y] = [at + 0.5, HEIGHT - (value / top) * HEIGHT];
      const isAlone = isBroken && (figures[at + 1]?.[one] ?? null) === null;
      const piece = isAlone ? `M${at + 0.2} ${y}H${at + 0.8}` : `${isBroken ? "M" : "L"}${x} ${y}`;
      isBroken = false;
      return piece;
    }).join("");
    return svg("path", { d: path, class: `chart-line tone-${tone}` });
  });
}

/** The first, the middle and the last interval. */
function ends(points) {
  return points.length < 3 ? points : [points[0], points[Math.floor((points.length - 1) / 2)], points.at(-1)];
}
