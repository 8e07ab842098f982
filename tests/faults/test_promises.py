"""The checker finds each kind of violation in evidence that has one, and none in evidence without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from evidence import Call, Effect, Evidence, Row, Span, Violation
from fault_plan import CallKind, CallPlan, FaultKind
from promises import violations

SENT, ANSWERED, DEADLINE = 1000.0, 1001.0, 1030.0


def call(call_id: str, kind: CallKind, outcome: str | None = "ok", **changes: Any) -> Call:
    """A call that was answered a second after it was sent."""
    plan = CallPlan(
        call_id=call_id, kind=kind, chat_key="chat", work_seconds=0, limit_seconds=30,
        cancel_after_seconds=changes.pop("cancel_after_seconds", None),
        detaches=changes.pop("detaches", False),
    )  # fmt: skip
    values = {"answered_at": ANSWERED, "detail": call_id, **changes}
    return Call(plan=plan, sent_at=SENT, deadline=DEADLINE, outcome=outcome, **values)


def effect(call_id: str, event: str, at: float = SENT + 0.5) -> Effect:
    """A line of a method."""
    return Effect(call_id=call_id, name=call_id, event=event, pid=1, at=at)


def kept() -> Evidence:
    """Evidence that keeps every promise: one call of each kind, and one cancelled."""
    evidence = Evidence(
        calls={
            "T": call("T", CallKind.TOOL),
            "E": call("E", CallKind.EFFECT),
            "K": call("K", CallKind.KEEP),
            "J": call("J", CallKind.JOB),
            "F": call("F", CallKind.FAIL, "MethodFailedError", detail="ValueError: F"),
            "P": call("P", CallKind.PERSON, detail="message"),
            "C": call("C", CallKind.EFFECT, "cancelled", cancel_after_seconds=0.1),
            "D": call("D", CallKind.EFFECT, "detached", detail="", detaches=True),
            "L": call("L", CallKind.FAIL, "detached", detail="", detaches=True),
        },
        messages={"message"},
        stored={"K"},
        jobs={"J": ["succeeded"]},
        listed={"D": "succeeded", "L": "failed"},
    )
    for name in ("T", "E", "K", "J", "F", "C", "D", "L", "job J"):
        evidence.effects[name] = [effect(name, "start"), effect(name, "end")]
    for name, state in {"E": "done", "K": "done", "J": "done", "F": "failed", "C": "cancelled"}.items():
        evidence.rows[name] = Row(
            id=name, type="behavior", state=state, error_type=None, observations=int(state == "done")
        )
    for name, state in {"D": "done", "L": "failed"}.items():
        evidence.rows[name] = Row(
            id=name, type="behavior", state=state, error_type=None, observations=1, is_detached=True
        )
    return evidence


def fault(kind: FaultKind, began: float = SENT - 1, ended: float = SENT) -> Callable[[Evidence], None]:
    """Add a fault."""
    return lambda evidence: evidence.faults.append(Span(kind=kind, began=began, ended=ended))


def add(call_id: str, event: str, at: float = SENT + 0.6) -> Callable[[Evidence], None]:
    """Add a line of a method."""
    return lambda evidence: evidence.effects.setdefault(call_id, []).append(effect(call_id, event, at))


def tell(call_id: str, outcome: str | None, **changes: Any) -> Callable[[Evidence], None]:
    """Change a caller's record."""

    def change(evidence: Evidence) -> None:
        evidence.calls[call_id].outcome = outcome
        for name, value in changes.items():
            setattr(evidence.calls[call_id], name, value)

    return change


def row(call_id: str, **changes: Any) -> Callable[[Evidence], None]:
    """Change a row."""
    return lambda evidence: evidence.rows.update({call_id: replace(evidence.rows[call_id], **changes)})


BROKEN: list[tuple[str, str, list[Callable[[Evidence], Any]]]] = [
    ("doubled-effect", "E", [add("E", "start"), fault(FaultKind.KILL)]),
    ("doubled-effect", "job J", [add("job J", "start"), fault(FaultKind.KILL)]),
    ("repeated-tool", "T", [add("T", "start")]),
    ("repeated-tool", "T", [add("T", "start"), fault(FaultKind.CUT)]),
    ("repeated-tool", "T", [add("T", "start"), fault(FaultKind.KILL, SENT - 90, SENT - 80)]),
    ("foreign-answer", "T", [tell("T", "ok", detail="E")]),
    ("foreign-answer", "F", [tell("F", "MethodFailedError", detail="ValueError: T")]),
    ("denied-effect", "E", [tell("E", "BrokerUnavailableError"), fault(FaultKind.CUT)]),
    ("denied-effect", "T", [tell("T", "OverloadedError"), fault(FaultKind.CUT)]),
    ("missing-effect", "T", [lambda evidence: evidence.effects.pop("T")]),
    ("missing-effect", "P", [lambda evidence: evidence.messages.clear()]),
    ("missing-effect", "K", [lambda evidence: evidence.stored.clear()]),
    ("missing-effect", "J", [lambda evidence: evidence.jobs.clear()]),
    ("missing-effect", "E", [lambda evidence: evidence.rows.pop("E")]),
    ("missing-effect", "E", [row("E", state="unknown", observations=0), fault(FaultKind.KILL)]),
    ("wrong-error", "T", [tell("T", "OutcomeUnknownError")]),
    ("wrong-error", "T", [tell("T", "CallTimeoutError")]),
    ("wrong-error", "T", [tell("T", "CallCancelledError"), fault(FaultKind.KILL)]),
    ("wrong-error", "T", [tell("T", "MethodFailedError"), fault(FaultKind.KILL)]),
    ("wrong-error", "T", [tell("T", "cancelled"), fault(FaultKind.KILL)]),
    ("wrong-error", "F", [tell("F", "ok", detail="F")]),
    ("wrong-error", "P", [tell("P", "OperationalError"), fault(FaultKind.KILL)]),
    ("late-answer", "T", [tell("T", None, answered_at=None)]),
    ("late-answer", "T", [tell("T", "none", answered_at=DEADLINE + 20)]),
    ("late-answer", "T", [tell("T", "CallTimeoutError", answered_at=DEADLINE + 11), fault(FaultKind.CUT)]),
    ("late-start", "T", [add("T", "start", DEADLINE + 3), fault(FaultKind.KILL)]),
    ("runs-on", "C", [add("C", "end", ANSWERED + 4)]),
    ("wrong-row", "C", [row("C", state="done", observations=1), lambda evidence: evidence.effects.pop("C")]),
    ("wrong-row", "E", [row("E", observations=0)]),
    ("wrong-row", "E", [row("E", observations=2)]),
    ("wrong-row", "C", [row("C", observations=1)]),
    (
        "wrong-row",
        "E",
        [
            row("E", state="failed", error_type="CallTimeoutError", observations=0),
            tell("E", "CallTimeoutError"),
            lambda evidence: evidence.effects.update({"E": [effect("E", "start")]}),
            fault(FaultKind.KILL),
        ],
    ),
    ("wrong-job", "J", [lambda evidence: evidence.jobs.update({"J": ["failed", "succeeded"]})]),
    ("wrong-job", "J", [lambda evidence: evidence.effects.pop("job J")]),
    ("wrong-job", "job J", [add("job J", "refused"), fault(FaultKind.DB_LOSE)]),
    (
        "wrong-job",
        "job J",
        [
            add("job J", "refused"),
            fault(FaultKind.DB_LOSE),
            lambda evidence: evidence.effects.update({"job J": evidence.effects["job J"][2:]}),
        ],
    ),
    ("wrong-error", "E", [tell("E", "detached")]),
    ("denied-effect", "D", [tell("D", "StorageUnavailableError"), fault(FaultKind.DB_AWAY)]),
    ("wrong-row", "L", [row("L", observations=0), fault(FaultKind.KILL)]),
    ("lost-detached", "D", [lambda evidence: evidence.rows.pop("D"), fault(FaultKind.KILL)]),
    ("lost-detached", "D", [row("D", is_detached=False), fault(FaultKind.KILL)]),
    ("lost-detached", "D", [lambda evidence: evidence.listed.pop("D"), fault(FaultKind.KILL)]),
    (
        "lost-detached",
        "D",
        [row("D", state="unknown"), lambda evidence: evidence.listed.update({"D": "failed"})],
    ),
    (
        "failed-round",
        "rounds",
        [lambda evidence: evidence.rounds.update({"failed": 1}), fault(FaultKind.DB_AWAY)],
    ),
    ("no-call", "run", [lambda evidence: evidence.calls.clear()]),
]


@pytest.mark.parametrize(("rule", "subject", "changes"), BROKEN, ids=[f"{r}-{s}" for r, s, _ in BROKEN])
def test_a_broken_promise_is_found(
    rule: str, subject: str, changes: list[Callable[[Evidence], None]]
) -> None:
    evidence = kept()
    for change in changes:
        change(evidence)
    assert (rule, subject) in {(found.rule, found.subject) for found in violations(evidence)}


KEPT: list[list[Callable[[Evidence], Any]]] = [
    [],
    [add("T", "start"), fault(FaultKind.KILL)],
    [tell("T", "BrokerUnavailableError"), fault(FaultKind.CUT), lambda evidence: evidence.effects.pop("T")],
    [tell("E", "OutcomeUnknownError"), fault(FaultKind.KILL), row("E", state="unknown", observations=0)],
    [tell("E", "OutcomeUnknownError"), fault(FaultKind.DB_AWAY)],
    [tell("T", None, answered_at=None, is_orphan=True)],
    [
        # Stopped at its time limit.
        row("E", state="failed", error_type="CallTimeoutError", observations=0, is_claimed=True),
        tell("E", "CallTimeoutError"),
        lambda evidence: evidence.effects.update({"E": [effect("E", "start")]}),
        fault(FaultKind.KILL),
    ],
    [
        row("D", state="unknown"),
        lambda evidence: evidence.listed.update({"D": "failed"}),
        fault(FaultKind.KILL),
    ],
    [
        tell("J", "MethodFailedError", detail="StorageUnavailableError: J"),
        lambda evidence: evidence.effects.update({"job J": [effect("job J", "refused")]}),
        lambda evidence: evidence.jobs.clear(),
        fault(FaultKind.DB_AWAY),
    ],
    [add("T", "start", DEADLINE + 3), fault(FaultKind.FREEZE, SENT, DEADLINE + 2.9)],
    [tell("K", "MethodFailedError", detail="StorageUnavailableError"), fault(FaultKind.DB_AWAY)],
]


@pytest.mark.parametrize("changes", KEPT, ids=map(str, range(len(KEPT))))
def test_permitted_behaviour_is_no_violation(changes: list[Callable[[Evidence], None]]) -> None:
    evidence = kept()
    for change in changes:
        change(evidence)
    assert violations(evidence) == []


def test_violations_detected_by_the_run_are_reported() -> None:
    evidence = kept()
    left = Violation(rule="left-process", subject="7", detail="bwrap")
    evidence.noticed.append(left)
    assert violations(evidence) == [left]
    assert str(left) == "VIOLATION left-process 7: bwrap"
