/** Numbers, times and sizes as people read them. The language is English, the time zone the reader's. */

const WHOLE = new Intl.NumberFormat("en");
const DAY = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });
const DAY_YEAR = new Intl.DateTimeFormat("en", { day: "numeric", month: "short", year: "numeric" });
const DAY_UTC = new Intl.DateTimeFormat("en", { day: "numeric", month: "short", timeZone: "UTC" });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const CLOCK_SECONDS = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const FULL = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long" });
const NOTHING = "–";

/** Milliseconds since the epoch of a time of the API; null if there is none. */
export function moment(text) {
  if (!text) return null;
  const found = Date.parse(text);
  return Number.isNaN(found) ? null : found;
}

export function count(number) {
  return number === null || number === undefined ? NOTHING : WHOLE.format(number);
}

/** "3 calls", "1 call". */
export function several(number, one, many = `${one}s`) {
  return `${WHOLE.format(number)} ${number === 1 ? one : many}`;
}

/** A length of time: "12 ms", "4.2 s", "3 min 5 s", "2 h 10 min". */
export function duration(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return NOTHING;
  const ms = Math.max(0, milliseconds);
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return joined(Math.floor(seconds / 60), "min", seconds % 60, "s");
  const minutes = Math.round(seconds / 60);
  if (minutes < 48 * 60) return joined(Math.floor(minutes / 60), "h", minutes % 60, "min");
  return joined(Math.floor(minutes / 1440), "d", Math.round((minutes % 1440) / 60), "h");
}

/** Time between two times of the API; `end` null means now. */
export function between(start, end) {
  const from = moment(start);
  return from === null ? null : (moment(end) ?? Date.now()) - from;
}

/** A time of day today, else with its day. */
export function when(text) {
  const at = moment(text);
  if (at === null) return NOTHING;
  const date = new Date(at);
  const now = new Date();
  if (date.toDateString() === now.toDateString()) return CLOCK.format(date);
  const day = date.getFullYear() === now.getFullYear() ? DAY : DAY_YEAR;
  return `${day.format(date)}, ${CLOCK.format(date)}`;
}

/** The day of a time, in UTC. */
export function dayOf(text) {
  const at = moment(text);
  return at === null ? NOTHING : DAY_UTC.format(at);
}

export function clock(text) {
  const at = moment(text);
  return at === null ? NOTHING : CLOCK_SECONDS.format(at);
}

/** Date, time and zone, for tooltips. */
export function exactly(text) {
  const at = moment(text);
  return at === null ? "" : FULL.format(at);
}

/** "in 5 min", "3 h ago". */
export function fromNow(text) {
  const at = moment(text);
  if (at === null) return NOTHING;
  const left = at - Date.now();
  if (Math.abs(left) < 1000) return "now";
  const length = rough(Math.abs(left));
  return left > 0 ? `in ${length}` : `${length} ago`;
}

export function bytes(number) {
  if (number === null || number === undefined) return NOTHING;
  if (number < 1000) return `${number} B`;
  if (number < 999_500) return `${(number / 1000).toFixed(number < 9950 ? 1 : 0)} kB`;
  return `${(number / 1_000_000).toFixed(number < 9_950_000 ? 1 : 0)} MB`;
}

/** An amount in the currency of the settings, with as many digits as it needs. */
export function cost(amount) {
  if (amount === null || amount === undefined) return NOTHING;
  if (amount === 0) return "0";
  if (Math.abs(amount) >= 1) return amount.toFixed(2);
  return amount.toPrecision(2).includes("e") ? amount.toExponential(1) : String(Number(amount.toPrecision(2)));
}

/** A text of at most so many characters, on one line. */
export function short(text, most = 80) {
  const line = String(text ?? "").replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

function joined(large, largeUnit, small, smallUnit) {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

function rough(milliseconds) {
  const units = [[86_400_000, "d"], [3_600_000, "h"], [60_000, "min"], [1000, "s"]];
  const [size, unit] = units.find(([one]) => milliseconds >= one);
  return `${Math.floor(milliseconds / size)} ${unit}`;
}

/** What a program waits for, as a phrase. */
export function waitText(wait) {
  const until = wait.until ? `until ${when(wait.until)}` : "";
  if (wait.kind === "time") return `Waits ${until}`.trim();
  if (wait.kind === "job") return `Waits for job ${wait.job_id} ${until}`.trim();
  return `Waits for the answer of ${wait.user_id ? short(wait.user_id, 40) : "a person"} to “${short(wait.question, 80)}” ${until}`.trim();
}
