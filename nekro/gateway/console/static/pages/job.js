/** One job: how far it is, its attempts, what it reported and logged, its result; it can be cancelled or started again. */

import { get, newest, path, post } from "../lib/api.js";
import { whenChanged } from "../lib/changes.js";
import { el, fill } from "../lib/dom.js";
import { between, clock, count, duration, exactly } from "../lib/format.js";
import { go, href } from "../lib/router.js";
import { badge, isOpen } from "../lib/states.js";
import { valueView } from "../lib/values.js";
import { acting, ask, button, copyButton, empty, keepState, meter, pageHead, say, section, table, time } from "../lib/widgets.js";
import { cancelButton, estimate, nameOf } from "./jobs.js";

export const title = "Job";
/** What entries of the log mean that are no words of the job. */
const KINDS = {
  started: "Started", report: "Progress", cancel_requested: "Asked to end", released: "Given back", restarted: "Starts again",
  done: "Done", failed: "Failed", cancelled: "Cancelled",
};

export async function show(place, { params, signal, setTitle }) {
  const address = path("/jobs", params.job);
  const read = async () => {
    const [job, log] = await Promise.all([get(address, {}, signal), get(`${address}/log`, {}, signal)]);
    setTitle(`Job ${nameOf(job)}`);
    return view(job, log, () => again());
  };
  const again = newest(read, (content) => keepState(place, content), signal);
  fill(place, await read());
  whenChanged(["jobs"], again, { signal });
}

function view(job, { attempts, entries }, again) {
  const name = nameOf(job);
  return el("div.page", { data: { job: job.id } },
    pageHead({
      title: name, crumbs: [["Jobs", href("/jobs")]], actions: [cancelButton(job, again), retryButton(job)].filter(Boolean),
      facts: [
        badge(job.state), `${job.type} · ${job.plugin}`,
        job.chat_key ? ["Chat", el("a", { href: href("/chats", job.chat_key) }, job.chat_key)] : null,
        job.turn_id ? el("a", { href: href("/turns", job.turn_id) }, "The turn that started it") : null,
        job.retry_of ? el("a", { href: href("/jobs", job.retry_of) }, "The job that it repeats") : null,
        ["Id", [el("code", {}, job.id), copyButton(job.id, "Copy the id")]],
      ],
    }),
    section("Progress",
      meter(job.percent, `Progress of ${name}`),
      el("p.job-text", {}, [`${job.percent} %`, job.message || null, ...estimate(job)].filter(Boolean).join(" · ")),
      el("dl.pairs", {}, times(job).map(([word, value]) => el("div", {}, el("dt", {}, word), el("dd", {}, value))))),
    section("Attempts", attempts.length ? attemptTable(attempts) : empty("No attempts are recorded", job.can_retry || isOpen(job.state) ? "No worker has started it." : "Calls that are shown as jobs, and jobs of earlier releases, have none.")),
    section("Log", entries.length ? logTable(entries) : empty("Nothing is recorded", "Progress and what the job's code logs, from the level INFO, appears here.")),
    job.data === null || job.data === undefined ? null : section(isOpen(job.state) ? "Data" : "Result", valueView(job.data, "Result")));
}

function retryButton(job) {
  if (!job.can_retry) return null;
  return button("Start again…", acting(async () => {
    if (!await ask({ title: `Start “${nameOf(job)}” again?`, content: el("p", {}, "A new job runs with the same arguments, also with effects that the first one had already."), confirm: "Start again" })) return;
    const started = await post(`${path("/jobs", job.id)}/retry`);
    say("The job is started again.");
    go(href("/jobs", started.id));
  }), { image: "retry", data: { key: `retry-${job.id}` } });
}

function times(job) {
  return [
    ["Queued", time(job.created_at)],
    ["Started", job.started_at ? time(job.started_at) : null],
    ["Asked to end", job.cancel_requested_at ? time(job.cancel_requested_at) : null],
    ["Ended", job.finished_at ? time(job.finished_at) : null],
  ].filter(([, value]) => value);
}

function attemptTable(attempts) {
  return table("Attempts", [
    { title: "Attempt", class: "number", cell: (one) => count(one.number) },
    { title: "Worker", cell: (one) => one.worker ?? "–" },
    { title: "Started", cell: (one) => time(one.started_at) },
    { title: "Ended", cell: (one) => one.ended_at ? time(one.ended_at) : one.outcome === "lost" ? el("span", {}, "last seen ", time(one.last_at)) : "–" },
    { title: "Took", class: "number", cell: (one) => one.outcome === "lost" ? "–" : duration(between(one.started_at, one.ended_at)) },
    { title: "Outcome", cell: (one) => badge(one.outcome) },
    { title: "Why", cell: (one) => one.message || "–" },
  ], attempts, { keyOf: (one) => one.number });
}

function logTable(entries) {
  return table("Log", [
    { title: "Time", class: "tight", cell: (one) => el("time", { datetime: one.at, title: exactly(one.at) }, clock(one.at)) },
    { title: "What", class: "tight", cell: (one) => one.level ?? KINDS[one.kind] ?? one.kind },
    { title: "Text", cell: (one) => [one.kind === "started" ? `attempt ${one.attempt} on ${one.worker}` : null, one.percent === null || one.percent === undefined ? null : `${one.percent} %`, one.text].filter(Boolean).join(" · ") || "–" },
  ], [...entries].reverse(), { isSmall: true });
}
