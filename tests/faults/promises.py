"""The promises of docs/reliability.md, judged by callers' logs, method logs and recorded rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Final

from evidence import Call, Evidence, Violation
from fault_plan import LEASE_SECONDS, LIMIT_SECONDS, OF_SERVER, REPEATED, CallKind, FaultKind

#: Errors after which a call has not run and will not run.
DID_NOT_RUN: Final = {"BrokerUnavailableError", "StorageUnavailableError", "OverloadedError"}
#: Other errors that the engine may raise around a fault.
IN_DOUBT: Final = {"OutcomeUnknownError"}
#: Seconds after its deadline by which a caller must have an answer.
ANSWER_SECONDS: Final = 10.0
#: Seconds after its deadline by which a method may still start: from the check to its first line.
START_SECONDS: Final = 2.0
#: Seconds that a worker may take to stop a cancelled call.
STOP_SECONDS: Final = 3.0
#: After these a TOOL call may run again: its worker is or appears dead, or Redis has lost data.
REPEATS_TOOLS: Final = {
    FaultKind.KILL,
    FaultKind.FREEZE,
    FaultKind.REDIS_ROLLBACK,
    FaultKind.REDIS_EMPTY,
}

Found = Iterator[tuple[str, str]]


def violations(evidence: Evidence) -> list[Violation]:
    """Every broken promise, including those that the run itself detected."""
    found = list(evidence.noticed)
    if not any(call.outcome == "ok" for call in evidence.calls.values()):
        found.append(Violation(rule="no-call", subject="run", detail="not one call was answered"))
    for rule, judge in _RULES.items():
        found += [Violation(rule=rule, subject=subject, detail=detail) for subject, detail in judge(evidence)]
    return found


def overlaps(
    evidence: Evidence,
    began: float,
    ended: float,
    *,
    kinds: Collection[FaultKind],
    aftermath_seconds: float,
) -> bool:
    """Whether a fault of some kinds, or its consequences, overlap a period."""
    return any(
        span.kind in kinds and span.began <= ended and span.ended + aftermath_seconds >= began
        for span in evidence.faults
    )


def is_calm(evidence: Evidence, call: Call) -> bool:
    """Whether no fault was near while a call was open."""
    ended = call.answered_at or call.deadline
    return not any(began <= ended and over >= call.sent_at for began, over in evidence.disturbed)


def methods(evidence: Evidence) -> Iterator[tuple[str, Call]]:
    """The calls of methods."""
    for call_id, call in evidence.calls.items():
        if call.plan.kind is not CallKind.PERSON:
            yield call_id, call


def doubled_effects(evidence: Evidence) -> Found:
    """Recorded calls and jobs start once, including those of rounds."""
    for call_id in evidence.effects:
        starts = evidence.times(call_id, "start")
        call, row = evidence.calls.get(call_id), evidence.rows.get(call_id)
        is_once = call is not None and call.plan.kind not in REPEATED
        is_once |= call_id.startswith("job ") or (row is not None and row.type != "tool")
        if is_once and len(starts) > 1:
            yield call_id, f"began {len(starts)} times, {starts[-1] - starts[0]:.1f} s apart"


def repeated_tools(evidence: Evidence) -> Found:
    """A TOOL call runs again only when its worker or MCP server died, or Redis lost its data."""
    for call_id, call in methods(evidence):
        starts = evidence.times(call_id, "start")
        if call.plan.kind not in REPEATED or len(starts) < 2:
            continue
        kinds = REPEATS_TOOLS | ({FaultKind.KILL_SERVER} if call.plan.kind in OF_SERVER else set())
        licence = {"kinds": kinds, "aftermath_seconds": 2 * LEASE_SECONDS}
        if not overlaps(evidence, call.sent_at, starts[-1], **licence):  # type: ignore[arg-type]
            yield call_id, f"began {len(starts)} times and no worker died"


def foreign_answers(evidence: Evidence) -> Found:
    """An answer, or a method's exception, belongs to its call."""
    for call_id, call in methods(evidence):
        if call.outcome == "ok" and call.detail != call_id:
            yield call_id, f"was answered {call.detail!r}"
        is_own_error = call.plan.kind is CallKind.FAIL and call.outcome == "MethodFailedError"
        if is_own_error and call_id not in call.detail:
            yield call_id, f"raised what it did not raise: {call.detail!r}"


def denied_effects(evidence: Evidence) -> Found:
    """A call that was reported as not run did not run."""
    for call_id, call in methods(evidence):
        starts = evidence.times(call_id, "start")
        if call.outcome in DID_NOT_RUN and starts:
            yield call_id, f"answered {call.outcome} ({call.detail[:120]}) and began at {starts[0]:.2f}"


def missing_effects(evidence: Evidence) -> Found:
    """An answered call ran to its end, and its effects are recorded."""
    for call_id, call in evidence.calls.items():
        if call.outcome != "ok":
            continue
        if call.plan.kind is CallKind.PERSON:
            if call.detail not in evidence.messages:
                yield call_id, f"message {call.detail} is not recorded"
            continue
        if not evidence.times(call_id, "end"):
            yield call_id, "was answered and has not run to its end"
        if call.plan.kind is CallKind.KEEP and call_id not in evidence.stored:
            yield call_id, "was answered and its value is not stored"
        if call.plan.kind is CallKind.JOB and call_id not in evidence.jobs:
            yield call_id, "was answered and its job is not recorded"
        if call.plan.kind not in REPEATED and _state(evidence, call_id) != "done":
            yield call_id, f"was answered and its row is {_state(evidence, call_id)}"


def wrong_errors(evidence: Evidence) -> Found:
    """An error has a cause: a fault, a close deadline, a cancellation, a failing method."""
    for call_id, call in evidence.calls.items():
        if call.outcome in (None, "none") or call.outcome in _expected(evidence, call):
            continue
        near = "near a fault" if not is_calm(evidence, call) else "without a fault"
        yield call_id, f"answered {call.outcome} {near}: {call.detail[:200]}"


def _expected(evidence: Evidence, call: Call) -> set[str]:
    expected = {"MethodFailedError"} if call.plan.kind is CallKind.FAIL else {"ok"}
    if call.plan.detaches:
        expected |= {"detached"}
    if call.plan.cancel_after_seconds is not None:
        expected |= {"cancelled"}
    if call.plan.limit_seconds < LIMIT_SECONDS or not is_calm(evidence, call):
        # A deadline that passes while a failure is compared with its row leaves an unknown outcome.
        expected |= {"CallTimeoutError"} | IN_DOUBT
    if not is_calm(evidence, call):
        expected |= DID_NOT_RUN | IN_DOUBT
        # A method's own database access may fail inside it, and so may its job.
        # A tool's server may be dead, or start again.
        if call.plan.kind in (CallKind.KEEP, CallKind.JOB, *OF_SERVER):
            expected |= {"MethodFailedError"}
    return expected


def late_answers(evidence: Evidence) -> Found:
    """Each call is answered soon after its deadline at the latest."""
    for call_id, call in evidence.calls.items():
        if call.answered_at is None or call.outcome == "none":
            if not call.is_orphan:
                yield call_id, f"no answer within {ANSWER_SECONDS:g} s after its deadline"
        elif call.answered_at > call.deadline + ANSWER_SECONDS:
            yield (
                call_id,
                f"answered {call.outcome} {call.answered_at - call.deadline:.1f} s after its deadline",
            )


def late_starts(evidence: Evidence) -> Found:
    """No call starts after its deadline; one in a worker frozen at that moment may continue."""
    for call_id, call in methods(evidence):
        for start in evidence.times(call_id, "start"):
            is_frozen = overlaps(
                evidence, call.deadline, start, kinds={FaultKind.FREEZE}, aftermath_seconds=START_SECONDS
            )
            if start > call.deadline + START_SECONDS and not is_frozen:
                yield call_id, f"began {start - call.deadline:.1f} s after its deadline"


def runs_on(evidence: Evidence) -> Found:
    """A cancelled call does not start any more, and stops."""
    for call_id, call in methods(evidence):
        if call.outcome != "cancelled" or call.answered_at is None or not is_calm(evidence, call):
            continue
        events = evidence.times(call_id, "start") + evidence.times(call_id, "end")
        if events and max(events) > call.answered_at + STOP_SECONDS:
            yield call_id, f"went on {max(events) - call.answered_at:.1f} s after it was given up"


def wrong_rows(evidence: Evidence) -> Found:
    """A row and the history agree with the method log."""
    for call_id, row in evidence.rows.items():
        starts, ends = evidence.times(call_id, "start"), evidence.times(call_id, "end")
        if row.state == "done" and not ends:
            yield call_id, "its row is done and it has not run to its end"
        expected = row.is_detached or (row.state == "done" and row.type != "tool")
        if row.observations != expected:
            yield call_id, f"its row is {row.state} and its chat has {row.observations} texts of it"
        is_timeout = row.state == "failed" and row.error_type == "CallTimeoutError"
        if is_timeout and not row.is_claimed and starts and not ends:
            # A claimed call was stopped at its time limit; the sweep ends only unclaimed ones.
            yield call_id, "its row says that it did not start"


def lost_detached(evidence: Evidence) -> Found:
    """A detached call is recorded and listed, runs to its end, and both rows say so."""
    for call_id, call in methods(evidence):
        if call.outcome != "detached":
            continue
        row = evidence.rows.get(call_id)
        if row is None or not row.is_detached:
            yield call_id, f"was detached and its row is {_state(evidence, call_id)}"
        elif (evidence.listed.get(call_id) == "succeeded") != (row.state == "done"):
            yield call_id, f"its row is {row.state} and its job is {evidence.listed.get(call_id)}"
        elif row.state != ("failed" if call.plan.kind is CallKind.FAIL else "done") and is_calm(
            evidence, replace(call, answered_at=call.deadline)
        ):
            yield call_id, f"was detached without a fault and its row is {row.state}"


def wrong_jobs(evidence: Evidence) -> Found:
    """A job that succeeded has run, a name has one job, and a job whose start failed does not run."""
    for name in (call_id for call_id in evidence.effects if call_id.startswith("job ")):
        starts, states = evidence.times(name, "start"), evidence.jobs.get(name.removeprefix("job "), [])
        if evidence.times(name, "refused") and (starts or states):
            what = f"began at {starts[0]:.2f}" if starts else f"is {states[0]}"
            yield name, f"its start was reported as failed, and it {what}"
    for name, states in evidence.jobs.items():
        if len(states) > 1:
            yield name, f"has {len(states)} jobs: {states}"
        if "succeeded" in states and not evidence.times(f"job {name}", "end"):
            yield name, "succeeded and has not run to its end"


def failed_rounds(evidence: Evidence) -> Found:
    """No fault makes a round fail: it is restarted or ended as interrupted."""
    for state in ("failed", "cancelled"):
        if state in evidence.rounds:
            yield "rounds", f"{evidence.rounds[state]} are {state}"


def _state(evidence: Evidence, call_id: str) -> str:
    row = evidence.rows.get(call_id)
    return "not there" if row is None else row.state


_RULES: Final[dict[str, Callable[[Evidence], Found]]] = {
    "doubled-effect": doubled_effects,
    "repeated-tool": repeated_tools,
    "foreign-answer": foreign_answers,
    "denied-effect": denied_effects,
    "missing-effect": missing_effects,
    "wrong-error": wrong_errors,
    "late-answer": late_answers,
    "late-start": late_starts,
    "runs-on": runs_on,
    "wrong-row": wrong_rows,
    "wrong-job": wrong_jobs,
    "lost-detached": lost_detached,
    "failed-round": failed_rounds,
}
