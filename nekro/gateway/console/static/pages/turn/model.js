/**
 * A turn in memory: the tree of the API, kept up to date by events. It knows nothing of the page.
 *
 * Events and trees may overlap in any order: applying an event twice, or one that the tree has already, changes
 * nothing.
 */

const ENDED = new Set(["done", "failed", "cancelled"]);
const ENDED_ROUND = new Set([...ENDED, "merged"]);

export class TurnModel {
  constructor(tree) {
    this.rounds = new Map();
    /** Live texts of running rounds, which no row has yet. */
    this.live = new Map();
    this.load(tree);
  }

  /** Replace the tree by a newer one; what only live events contain stays. */
  load(tree) {
    const calls = new Map(this.rounds.size ? [...this.rounds.values()].flatMap((round) => [...round.calls]) : []);
    this.turn = tree;
    this.rounds = new Map(tree.rounds.map((round) => [round.id, { ...round, calls: new Map(round.calls.map((call) => [call.id, { ...seen(calls.get(call.id)), ...call }])) }]));
    this.messages = tree.messages;
    this.jobs = new Map(tree.jobs.map((job) => [job.id, job]));
    for (const job of tree.jobs) this.progressOf(job);
    for (const [id, round] of this.rounds) if (ENDED_ROUND.has(round.state)) this.live.delete(id);
  }

  get isEnded() {
    return ENDED.has(this.turn.state);
  }

  /** Whether events may still come: it runs, a job goes on, or a call waits for approval. */
  get isOpen() {
    return !this.isEnded || [...this.jobs.values()].some((job) => !ENDED.has(job.state)) || this.calls().some((call) => call.state === "awaiting");
  }

  calls() {
    return [...this.rounds.values()].flatMap((round) => [...round.calls.values()]);
  }

  /** Give a call that reports progress what its job says. */
  progressOf(job) {
    if (job.state !== "running") return;
    for (const round of this.rounds.values()) {
      const call = round.calls.get(job.id) ?? round.calls.get(job.task_id);
      if (call && !call.finished_at && !call.progress) call.progress = { percent: job.percent, message: job.message };
    }
  }

  /** The jobs of plugins; calls that report progress are listed as jobs too, but are calls here. */
  ownJobs() {
    return [...this.jobs.values()].filter((job) => ![...this.rounds.values()].some((round) => round.calls.has(job.id) || round.calls.has(job.task_id)));
  }

  /** Sums over all rounds; null if no round has the figure. */
  sum(name) {
    const figures = [...this.rounds.values()].map((round) => round[name]).filter((figure) => figure !== null && figure !== undefined);
    return figures.length ? figures.reduce((total, figure) => total + figure, 0) : null;
  }

  isOwn(event) {
    return event.turn_id === this.turn.id || this.rounds.has(event.round_id);
  }

  /**
   * Take an event. Returns {round, call, turn, job, reload}: what changed (ids), and whether the tree has to be
   * read again ("soon" or "now"); null if it is of another turn or changes nothing.
   */
  apply(event) {
    if (!this.isOwn(event)) return null;
    const change = HANDLERS[event.type]?.(this, event, this.rounds.get(event.round_id));
    return change ?? null;
  }

  liveOf(roundId) {
    if (!this.live.has(roundId)) this.live.set(roundId, { answer: "", output: "", try: null, ends: {}, missed: {} });
    return this.live.get(roundId);
  }
}

const HANDLERS = {
  "turn.started": () => null,
  "round.started": (model, event, known) => {
    const { number, attempt, worker, cause } = event.data;
    if (known && (ENDED_ROUND.has(known.state) || known.attempt >= attempt)) return null;
    const round = known ?? { ...EMPTY_ROUND, id: event.round_id, turn_id: event.turn_id, number, cause, requested_at: event.at, calls: new Map() };
    Object.assign(round, { state: "running", attempt, worker, started_at: event.at });
    model.rounds.set(round.id, round);
    model.live.delete(round.id);
    if (!model.isEnded) model.turn = { ...model.turn, state: "running", started_at: model.turn.started_at ?? event.at };
    return { round: round.id, turn: true };
  },
  "program.resumed": (model, event, round) => {
    const { attempt, worker } = event.data;
    if (!round || ENDED_ROUND.has(round.state) || round.attempt >= attempt) return null;
    const attempts = [...(round.attempts ?? []), { number: attempt, worker, started_at: event.at, is_resumed: true }];
    return changed(round, { state: "running", attempt, worker, attempts });
  },
  "model.requested": (model, event, round) => changed(round, { prompt_chars: event.data.prompt_chars, asked_at: event.at }),
  "model.delta": (model, event, round) => {
    if (!round || round.code !== null && round.code !== undefined || ENDED_ROUND.has(round.state)) return null;
    const live = model.liveOf(round.id);
    if (live.try !== event.data.try) Object.assign(live, { try: event.data.try, answer: "", ends: { ...live.ends, answer: 0 }, missed: { ...live.missed, answer: 0 } });
    append(live, "answer", event.data);
    return { round: round.id };
  },
  "code.ready": (model, event, round) => {
    const { code, model: name, prompt_tokens, completion_tokens, tokens_estimated = false, cost, tries, failed_groups, tool_calls_kept = true } = event.data;
    return changed(round, { code, tool_calls_kept, model: name, prompt_tokens, completion_tokens, tokens_estimated, cost, tries, failed_groups, answered_at: round?.answered_at ?? event.at });
  },
  "output.chunk": (model, event, round) => {
    if (!round || event.call_id || ENDED_ROUND.has(round.state)) return null;
    const live = model.liveOf(round.id);
    append(live, "output", event.data);
    return { round: round.id, output: true };
  },
  "call.started": (model, event, round) => {
    if (!round) return null;
    const known = round.calls.get(event.call_id);
    if (known?.requested_at) return null;
    const call = { ...EMPTY_CALL, ...event.data, ...known, id: event.call_id, state: known?.state ?? "running", requested_at: event.at };
    round.calls.set(call.id, call);
    return { round: round.id, call: call.id };
  },
  "call.progress": (model, event, round) => {
    const call = round?.calls.get(event.call_id);
    if (!call || call.finished_at) return null;
    return changed(call, { progress: event.data, state: "running" }, { round: round.id, call: event.call_id });
  },
  "call.ended": (model, event, round) => {
    if (!round) return null;
    const known = round.calls.get(event.call_id) ?? { ...EMPTY_CALL, id: event.call_id };
    round.calls.set(known.id, known);
    if (known.finished_at && known.state === event.data.state) return null;
    const { error, state, ...rest } = event.data;
    const ended = state === "running" || state === "awaiting" ? null : event.at;
    return changed(known, { ...rest, state, error: errorOf(error), finished_at: known.finished_at ?? ended, progress: null }, { round: round.id, call: known.id });
  },
  "approval.requested": (model, event, round) => approval(event, round, "awaiting"),
  "approval.decided": (model, event, round) => ({ ...approval(event, round, event.data.state === "approved" ? "queued" : "cancelled"), reload: "soon" }),
  "wait.started": () => null,
  "wait.ended": () => ({ turn: true, reload: "soon" }),
  "round.ended": (model, event, round) => {
    if (!round || ENDED_ROUND.has(round.state)) return null;
    const { error, ...rest } = event.data;
    return changed(round, { ...rest, output: longer(rest.output, model.live.get(round.id)), finished_at: event.at, error: error ? { code: rest.state, text: error } : null }, { round: round.id, turn: true, reload: "soon" });
  },
  "turn.ended": (model, event) => {
    model.turn = { ...model.turn, state: event.data.state, waits_for: event.data.waits_for ?? [], waits: event.data.waits ?? [], error: event.data.error ?? null, finished_at: event.at };
    return { turn: true, reload: "now" };
  },
  "message.received": () => ({ reload: "soon" }),
  "message.sent": () => ({ reload: "soon" }),
  "message.noted": () => ({ reload: "soon" }),
  "file.sent": () => ({ reload: "soon" }),
  "job.started": (model, event) => job(model, event),
  "job.progress": (model, event) => job(model, event),
  "job.ended": (model, event) => job(model, event),
};

const EMPTY_ROUND = { state: "requested", attempt: 0, worker: null, started_at: null, answered_at: null, finished_at: null, prompt_chars: null, observation: null, model: null, prompt_tokens: null, completion_tokens: null, tokens_estimated: false, cost: null, answer: null, code: null, output: null, stop_type: null, exit_code: null, error: null, merged_into: null, cancel_requested_at: null };
const EMPTY_CALL = { method: "", type: "tool", state: "running", lane: null, worker: null, requested_at: null, started_at: null, finished_at: null, duration_ms: null, attempts: null, arguments: null, value: null, error: null, follow_up: null, approval_id: null };

function changed(target, values, change = null) {
  if (!target) return null;
  Object.assign(target, values);
  return change ?? { round: target.id };
}

function approval(event, round, state) {
  const call = round?.calls.get(event.call_id);
  if (!call) return { reload: "soon" };
  Object.assign(call, { state, approval_id: event.data.approval_id });
  return { round: round.id, call: call.id };
}

const JOB_STATES = { succeeded: "done" };

function job(model, event) {
  const { job_id: id, state, percent, message } = event.data;
  const known = model.jobs.get(id);
  if (!known) return { reload: "soon" };
  model.jobs.set(id, { ...known, state: JOB_STATES[state] ?? state, percent, message, updated_at: event.at });
  return { job: id, reload: event.type === "job.ended" ? "soon" : undefined };
}

/** What an older copy of a call has and a tree lacks. */
function seen(call) {
  return call ? { line: call.line ?? null, progress: call.progress ?? null, arguments_bytes: call.arguments_bytes, value_bytes: call.value_bytes } : {};
}

/** "<type>: <message>", as the sandboxed code saw it. */
function errorOf(text) {
  if (!text) return null;
  const at = text.indexOf(": ");
  return at < 0 ? { code: text, text } : { code: text.slice(0, at), text: text.slice(at + 2) };
}

/**
 * Append a piece that begins at an offset; what is known already is left out. If a part before it was missed, the
 * text begins with the piece, and `missed` says how many characters are not shown.
 */
function append(live, name, { offset, text }) {
  const end = live.ends[name] ?? 0;
  if (offset + text.length <= end) return;
  if (offset > end) Object.assign(live, { [name]: text, missed: { ...live.missed, [name]: offset } });
  else live[name] += text.slice(end - offset);
  live.ends[name] = offset + text.length;
}

function longer(kept, live) {
  return live && !live.missed.output && live.output.length > (kept ?? "").length ? live.output : kept;
}
