/** The parts of which pages are made. */

import { isPassing, newest } from "./api.js";
import { el, fill, setText } from "./dom.js";
import { duration, exactly, fromNow, when } from "./format.js";
import { icon } from "./icons.js";

/** The head of a page: where it is, its title (a heading, if it changes), facts, and what can be done. */
export function pageHead({ title, crumbs = [], facts = [], actions = [], lead = null }) {
  const heading = title instanceof Node ? title : el("h1", { tabindex: "-1" }, title);
  return el("header.page-head", {},
    crumbs.length ? el("nav.crumbs", { aria: { label: "Breadcrumb" } }, crumbs.map(([text, address]) => el("a", { href: address }, text))) : null,
    el("div.page-title", {}, heading, actions.length ? el("div.actions", {}, actions) : null),
    lead ? el("p.lead", {}, lead) : null,
    facts.length ? factRow(facts) : null);
}

/** A line of facts: nodes, texts or [label, value]. */
export function factRow(facts) {
  return el("ul.facts", { role: "list" }, facts.filter(Boolean).map((fact) =>
    el("li", {}, Array.isArray(fact) ? [el("span.fact-label", {}, fact[0]), " ", fact[1]] : fact)));
}

/** A titled part of a page. */
export function section(title, ...content) {
  const id = nextId("section");
  return el("section.card", { aria: { labelledby: id } }, el("h2", { id }, title), content);
}

export function button(text, onClick, { kind = "", image = null, label = null, ...props } = {}) {
  const name = ["button", "button", ...kind.split(" ").filter(Boolean)].join(".");
  return el(name, { type: "button", on: onClick ? { click: onClick } : {}, aria: label ? { label } : {}, title: label, ...props },
    image ? icon(image) : null, text ? el("span", {}, text) : null);
}

/** Run work of a button: it is disabled meanwhile, and an error is announced. */
export function acting(work) {
  return async (event) => {
    const pressed = event.currentTarget;
    if (pressed.getAttribute("aria-busy") === "true") return;
    pressed.setAttribute("aria-busy", "true");
    try {
      await work(event);
    } catch (error) {
      if (error.name !== "AbortError") say(error.message, "bad");
    } finally {
      pressed.removeAttribute("aria-busy");
    }
  };
}

export function empty(title, text = "", ...actions) {
  return el("div.empty", {}, el("p.empty-title", {}, title), text ? el("p", {}, text) : null, actions);
}

export function loading(lines = 4) {
  return el("div.loading", { role: "status" }, el("span.hidden-text", {}, "Loading"), Array.from({ length: lines }, () => el("div.bone")));
}

export function failed(error, retry = null) {
  return el("div.failed", { role: "alert" },
    el("p.empty-title", {}, error.status === 404 ? "Not found" : "This could not be loaded"),
    el("p", {}, error.message),
    error.requestId ? el("p.quiet-text", {}, `Request ${error.requestId}`) : null,
    retry ? button("Try again", retry, { image: "refresh" }) : null);
}

/**
 * Show what `load({quietly, again})` returns in a place; skeleton, errors and another try included. `again()` of
 * these options loads quietly.
 *
 * Returns a function that loads again: quietly, what is shown stays until then, also after an error. It resolves
 * to false if it failed and another try may succeed.
 */
export function loaded(place, load, { signal, lines = 4 } = {}) {
  const read = newest((quietly) => load({ quietly, again: () => again({ quietly: true }) }), (content) => keepState(place, content), signal);
  const again = async ({ quietly = false } = {}) => {
    if (!quietly) fill(place, loading(lines));
    try {
      await read(quietly);
    } catch (error) {
      if (error.name === "AbortError") return true;
      if (!quietly || place.querySelector(".failed")) fill(place, failed(error, () => again()));
      return !isPassing(error);
    }
    return true;
  };
  again();
  return again;
}

/** Replace the content of a place; elements with the same data-key keep the focus, and disclosures stay open. */
export function keepState(place, content) {
  const held = place.contains(document.activeElement) ? document.activeElement.closest("[data-key]")?.dataset.key : null;
  const open = new Set([...place.querySelectorAll("details[open][data-key]")].map((one) => one.dataset.key));
  fill(place, content);
  for (const one of place.querySelectorAll("details[data-key]")) {
    if (!open.has(one.dataset.key)) continue;
    one.open = true;
    one.dispatchEvent(new Event("toggle")); // builds its content now, so that the page keeps its height
  }
  if (held) [...place.querySelectorAll("[data-key]")].find((one) => one.dataset.key === held)?.focus({ preventScroll: true });
}

/** Draw what follows from the time alone every so many seconds while the page is seen; it must not ask the API. */
export function localClock(seconds, draw, signal = null) {
  const timer = setInterval(() => { if (!document.hidden) draw(); }, seconds * 1000);
  signal?.addEventListener("abort", () => clearInterval(timer), { once: true });
}

/** Let all relative times and ages of the page go on. */
export function tickTimes() {
  for (const one of document.querySelectorAll("time[data-relative]")) setText(one, fromNow(one.dateTime));
  for (const one of document.querySelectorAll("[data-since]")) setText(one, duration(Date.now() - Number(one.dataset.since)));
}

/** How long something has lasted, as it goes on; null: nothing does. */
export function age(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return el("span", { data: { since: Date.now() - seconds * 1000 } }, duration(seconds * 1000));
}

/**
 * A table that becomes a list of cards on a narrow screen.
 *
 * @param {Array<{title: string, cell: Function, class?: string}>} columns
 * @param {object} options keyOf(row): a mark of the row; isSmall: it fits a narrow screen as it is
 */
export function table(caption, columns, rows, { keyOf = null, isSmall = false } = {}) {
  const head = el("tr", { role: "row" }, columns.map((one) => el("th", { scope: "col", role: "columnheader", class: one.class }, one.title || el("span.hidden-text", {}, "Actions"))));
  const body = rows.map((row) => el("tr", { role: "row", data: keyOf ? { row: keyOf(row) } : {} },
    columns.map((one) => el("td", { role: "cell", class: one.class, data: { label: one.title } }, one.cell(row)))));
  return el(isSmall ? "div.table-wrap.small-table" : "div.table-wrap", { tabindex: "0", role: "group", aria: { label: caption }, data: { key: `table ${caption}` } },
    el("table", { role: "table" }, el("caption.hidden-text", {}, caption),
      el("thead", { role: "rowgroup" }, head), el("tbody", { role: "rowgroup" }, body)));
}

/**
 * A list that is read page by page. `page(cursor)` returns {items, next_cursor}; `show(items)` their content.
 *
 * @param {object} options none: shown without items; held: an object of the caller that keeps how many pages are
 *   wanted; quietly: read as many again; again(): load the list again
 */
export async function paged(page, show, { none, held, quietly, again }) {
  if (!quietly) held.pages = 1;
  const items = [];
  let cursor = null;
  let pages = 0;
  do {
    const answer = await page(cursor);
    items.push(...answer.items);
    cursor = answer.next_cursor;
    pages += 1;
    // A page may be empty although another one follows.
  } while (cursor && (pages < held.pages || !items.length));
  if (!items.length) return none;
  // The whole list, so that a change that comes meanwhile cannot show fewer pages.
  const more = button("Show more", acting(async () => {
    held.pages = pages + 1;
    await again();
    if (more.isConnected) throw new Error("More could not be read. Try again.");
  }), { hidden: !cursor, kind: "wide", data: { key: "more" } });
  return el("div.paged", {}, el("div", {}, show(items)), more);
}

/** A time, as a distance from now or as a date; the tooltip has it in full. */
export function time(text, { relative = false } = {}) {
  return text ? el("time", { datetime: text, title: exactly(text), data: relative ? { relative: "" } : {} }, relative ? fromNow(text) : when(text)) : "–";
}

/** A disclosure whose content is made when it is first opened. */
export function fold(summary, content, { open = false, ...props } = {}) {
  const body = el("div.fold-body");
  const node = el("details.fold", props, el("summary", {}, summary), body);
  const build = () => { if (node.open && !body.hasChildNodes()) fill(body, content()); };
  node.addEventListener("toggle", build);
  if (open) { node.open = true; build(); }
  return node;
}

export function copyButton(text, label = "Copy") {
  return button("", acting(async () => {
    await copy(typeof text === "function" ? text() : text);
    say("Copied.");
  }), { kind: "quiet small", image: "copy", label });
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Without a secure origin there is no clipboard interface.
  const area = el("textarea.off-screen", { value: text, aria: { hidden: true } });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Announce something at the edge of the page, also to screen readers. */
export function say(text, tone = "good") {
  const notes = document.getElementById(tone === "bad" ? "alerts" : "notes");
  const note = el("div.note", { data: { tone } }, el("span", {}, text),
    button("", () => note.remove(), { kind: "quiet small", image: "close", label: "Dismiss" }));
  notes.append(note);
  setTimeout(() => note.remove(), tone === "bad" ? 12_000 : 5_000);
}

/**
 * Ask in a dialog. Resolves to false when it is closed, else to what `read` returns (true without one).
 *
 * @param {object} options title; content (nodes); confirm (text of the button); danger; read()
 */
export function ask({ title, content = [], confirm = "OK", danger = false, read = () => true, wide = false }) {
  const id = nextId("dialog");
  return new Promise((resolve) => {
    const fault = el("p.fault", { role: "alert" });
    const form = el("form", { method: "dialog", on: { submit: submit } },
      el("h2", { id }, title), content, fault,
      el("div.dialog-actions", {},
        button("Cancel", () => box.close()),
        el(danger ? "button.danger" : "button.primary", { type: "submit" }, confirm)));
    const box = el(wide ? "dialog.wide-dialog" : "dialog", { aria: { labelledby: id } }, form);
    let answer = false;
    async function submit(event) {
      event.preventDefault();
      fault.textContent = "";
      try {
        answer = await read();
        box.close();
      } catch (error) {
        answer = false;
        fault.textContent = error.message;
      }
    }
    box.addEventListener("close", () => { box.remove(); resolve(answer); });
    document.body.append(box);
    box.showModal();
  });
}

let ids = 0;
export function nextId(name) {
  ids += 1;
  return `${name}-${ids}`;
}

/** A labelled control, with a hint below it. */
export function field(label, control, { hint = null, optional = false } = {}) {
  control.id ||= nextId("field");
  const hintId = `${control.id}-hint`;
  if (hint) control.setAttribute("aria-describedby", hintId);
  return el("div.field", {},
    el("label", { for: control.id }, label, optional ? el("span.quiet-text", {}, " (optional)") : null),
    control, hint ? el("p.hint", { id: hintId }, hint) : null);
}

/** A tick with its label on one line. */
export function tick(label, checked = false, { hint = null, ...props } = {}) {
  const box = el("input", { type: "checkbox", checked, id: nextId("tick"), ...props });
  const hintId = `${box.id}-hint`;
  if (hint) box.setAttribute("aria-describedby", hintId);
  return { box, node: el("div.field.tick", {}, box, el("label", { for: box.id }, label), hint ? el("p.hint", { id: hintId }, hint) : null) };
}

export function select(options, value, props = {}) {
  return el("select", props, options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
}

/** A bar of progress, 0 to 100; null if it is not known. */
export function meter(percent, label) {
  const bar = el("span.meter-fill", { style: { width: `${Math.max(0, Math.min(100, percent ?? 0))}%` } });
  return el("span.meter", { role: "progressbar", aria: { label, valuemin: 0, valuemax: 100, valuenow: percent ?? null } }, bar);
}
