/** Background jobs: what they do, how far they are, when they will end. */

import { get, path, post } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { between, duration, moment } from "../lib/format.js";
import { href, remember } from "../lib/router.js";
import { badge, isOpen } from "../lib/states.js";
import { inline } from "../lib/values.js";
import { acting, ask, button, empty, loaded, meter, paged, pageHead, say, time } from "../lib/widgets.js";

export const title = "Jobs";

export function show(place, { query, signal }) {
  let openOnly = query.get("show") !== "all";
  const list = el("div");
  const held = {};
  const choices = [["open", "Open"], ["all", "All"]];
  const buttons = choices.map(([key, name]) => el("button", { type: "button", aria: { pressed: String((key === "open") === openOnly) }, on: { click: () => {
    openOnly = key === "open";
    remember({ show: openOnly ? null : "all" });
    buttons.forEach((one, at) => one.setAttribute("aria-pressed", String((choices[at][0] === "open") === openOnly)));
    again();
  } } }, name));
  fill(place, pageHead({ title, lead: "Work that goes on after the code that started it has ended." }),
    el("div.toolbar", {}, el("div.segments", { role: "group", aria: { label: "Jobs shown" } }, buttons)), list);
  const again = loaded(list, (how) => paged(
    (cursor) => get("/jobs", { open: openOnly || null, cursor, limit: 50 }, signal),
    (items) => el("ul.list.job-list", { role: "list" }, items.map((job) => el("li", {}, jobRow(job, () => again({ quietly: true }))))),
    { ...how, held, none: empty(openOnly ? "No open jobs" : "No jobs yet", "Plugins start jobs for work that takes longer than a call.") }), { signal });
  whenChanged(["jobs"], () => again({ quietly: true }), { signal });
}

/** One job, with its progress, rate and time left. */
export function jobRow(job, onChange) {
  const isRunning = isOpen(job.state);
  const name = nameOf(job);
  return el("article.job", { data: { job: job.id } },
    el("div.job-main", {},
      el("div.split", {}, el("a.job-name", { href: href("/jobs", job.id) }, name), badge(job.state)),
      el("p.quiet-text", {}, name === job.type ? job.plugin : `${job.type} · ${job.plugin}`, job.chat_key ? [" · ", el("a", { href: href("/chats", job.chat_key) }, job.chat_key)] : null),
      isRunning ? meter(job.percent, `Progress of ${name}`) : null,
      el("p.job-text", {}, [job.percent ? `${job.percent} %` : null, job.message || null, ...estimate(job)].filter(Boolean).join(" · ") || " "),
      job.data ? el("p.quiet-text.mono", {}, inline(job.data, 160)) : null),
    el("div.job-side", {}, el("span.quiet-text", {}, job.attempt > 1 ? `attempt ${job.attempt} · ` : "", isRunning ? ["since ", time(job.started_at ?? job.created_at)] : time(job.finished_at)), cancelButton(job, onChange)));
}

/** A button that asks a job to end; null when it has ended. */
export function cancelButton(job, onChange) {
  if (!isOpen(job.state)) return null;
  return button("Cancel", acting(async () => {
    if (!await ask({ title: `Cancel the job “${nameOf(job)}”?`, content: el("p", {}, "It ends as soon as its plugin allows it."), confirm: "Cancel the job", danger: true })) return;
    await post(`${path("/jobs", job.id)}/cancel`);
    say("The job is asked to end.");
    onChange();
  }), { kind: "small", label: `Cancel the job “${nameOf(job)}”`, data: { key: `cancel-${job.id}` } });
}

/** The plugin's own name of a job; calls have none, only an id. */
export function nameOf(job) {
  return job.task_id && job.task_id !== job.id && !/^[0-9a-f]{32}$/.test(job.task_id) ? job.task_id : job.type;
}

/** How fast it goes on average, and how long it will take at that rate. */
export function estimate(job) {
  const lasted = between(job.started_at, job.finished_at);
  if (!isOpen(job.state)) return lasted === null ? [] : [`took ${duration(lasted)}`];
  // Until now, not until its last report: a job that waits gets slower.
  const worked = Date.now() - moment(job.started_at);
  if (!job.started_at || !job.percent || worked <= 0) return [];
  const perMinute = (job.percent / worked) * 60_000;
  const left = ((100 - job.percent) * worked) / job.percent;
  return [`${perMinute >= 10 ? Math.round(perMinute) : perMinute.toFixed(1)} % per minute`, `about ${duration(Math.max(1000, left))} left`];
}
