"""Describe rounds, runs and their calls: as data for ``--json``, and rounds as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from nekro.agent.answers.extraction import text_beside_code
from nekro.cli.output import one_line
from nekro_agent.tools.visible_text import visible_lines

if TYPE_CHECKING:
    from nekro_client.models import Call, Round, Run, TurnError

__all__ = ["describe_round", "describe_run", "round_lines"]

_TEXT_COLUMNS: Final = 100
#: Most lines of a program or its output in the text; ``--json`` has all.
_MOST_LINES: Final = 60

_TIMES: Final = ("requested_at", "started_at", "finished_at")
#: What only the tree of a turn has.
_OF_TREE: Final = (
    "attempts",
    "prompted_at",
    "model_group",
    "model_tries",
    "tool_calls_kept",
)
_OF_TREE_CALLS: Final = {
    "error", "state", "attempts", "arguments", "value", "line", "round_attempt"
}  # fmt: skip


def describe_call(call: Call) -> dict[str, Any]:
    """Return one call of a round or run as commands print it."""
    known = call.model_dump(exclude=_OF_TREE_CALLS)
    times = {name: known[name] and known[name].isoformat() for name in _TIMES}
    return (
        known
        | times
        | {
            "worker": call.worker or "",
            "error": call.error and _error_text(call.error),
            "awaits_approval": call.state == "awaiting" and call.approval_id is not None,
            "is_waiting": call.state == "awaiting" and call.approval_id is None,
        }
    )


def describe_round(entry: Round) -> dict[str, Any]:
    """Return one round as ``nekro history --trace --json`` prints it."""
    known = entry.model_dump(exclude={"cause", "calls", "error", "turn_id", "user_id", *_OF_TREE})
    return known | {
        "turn": entry.turn_id,
        "user": entry.user_id,
        "trigger": entry.cause.kind,
        "trigger_id": entry.cause.id,
        "error": entry.error and entry.error.text,
        "calls": [describe_call(call) for call in entry.calls],
    }


def describe_run(report: Run) -> dict[str, Any]:
    """Return the report of a run as ``nekro exec --json`` prints it."""
    return {
        "stop_type": report.stop_type,
        "exit_code": report.exit_code,
        "output": report.output,
        "calls": [describe_call(call) for call in report.calls],
        "follow_ups": [
            {"method": call.method, "round_id": call.follow_up} for call in report.calls if call.follow_up
        ],
    }


def _error_text(error: TurnError) -> str:
    """Return ``<type>: <message>``; the API has the whole text where there is no message."""
    whole = (error.code, f"{error.code}: ")
    return error.text if error.text in whole else f"{error.code}: {error.text}"


def round_lines(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show a round, as ``describe_round`` returns it."""
    state = " ".join(word for word in (entry["state"], entry["stop_type"]) if word)
    cause = one_line(f"{entry['trigger']} {entry['trigger_id']}", limit=60)
    yield f"turn {entry['turn'][:8]} round {entry['number']}: {state}, caused by {cause}"
    if entry["merged_into"] is not None:
        yield f"  merged into round {entry['merged_into']}"
        return
    yield from (f"  {one_line(line)}" for line in (_when(entry), _prompt(entry)) if line)
    if entry["error"]:
        yield f"  {one_line(entry['error'], limit=_TEXT_COLUMNS)}"
    if entry["code"] is None and entry["answer"]:
        yield "  answered in words, which were sent"
    elif entry["answer"]:
        yield from _block("beside the code", text_beside_code(entry["answer"]))
    yield from _block("code", entry["code"])
    if entry["not_resumable"]:
        yield f"  not to be run again if its worker dies: {one_line(entry['not_resumable'])}"
    for call in entry["calls"]:
        yield f"  call {one_line(_call(call))}"
    yield from _block("output", entry["output"])


def _when(entry: Mapping[str, Any]) -> str:
    if entry["started_at"] is None:
        return f"waiting since {entry['requested_at']:%H:%M:%S}"
    attempt = f", attempt {entry['attempt']}" if entry["attempt"] > 1 else ""
    parts = [
        f"{entry['started_at']:%Y-%m-%d %H:%M:%S} on {entry['worker']}{attempt}",
        _lasted("model", entry["started_at"], entry["answered_at"]),
        _lasted("program", entry["answered_at"], entry["finished_at"]),
    ]
    return ", ".join(part for part in parts if part)


def _prompt(entry: Mapping[str, Any]) -> str:
    if entry["prompt_chars"] is None:
        return ""
    parts = [
        f"prompt of {entry['prompt_chars']} characters",
        f"to {entry['model']}" if entry["model"] else "",
    ]
    if entry["prompt_tokens"] is not None or entry["completion_tokens"] is not None:
        estimated = " (estimated)" if entry["tokens_estimated"] else ""
        tokens = f"{_figure(entry['prompt_tokens'])} + {_figure(entry['completion_tokens'])} tokens"
        parts.append(tokens + estimated)
    if entry["cost"] is not None:
        parts.append(f"cost {entry['cost']:.6g}")
    return ", ".join(part for part in parts if part)


def _call(call: Mapping[str, Any]) -> str:
    begun = call["started_at"] or call["requested_at"]
    lasted = call["duration_ms"]
    parts = [
        f"{call['method']} ({call['type']}) in lane {call['lane']}",
        f"on {call['worker']}" if call["worker"] else "",
        f"at {datetime.fromisoformat(begun):%H:%M:%S.%f}"[:-3],
        f"{lasted / 1000:.3f} s" if lasted is not None else "",
    ]
    text = " ".join(part for part in parts if part)
    if call["follow_up"]:
        text += f", triggered round {call['follow_up'][:8]}"
    return text + (f": {one_line(call['error'], limit=_TEXT_COLUMNS)}" if call["error"] else "")


def _lasted(what: str, begin: datetime | None, end: datetime | None) -> str:
    return f"{what} {(end - begin).total_seconds():.2f} s" if begin and end else ""


def _figure(count: int | None) -> str:
    return "?" if count is None else str(count)


def _block(title: str, text: str | None) -> Iterator[str]:
    if not text or not text.strip("\n"):
        return
    lines = visible_lines(text.strip("\n"))
    yield f"  {title}"
    yield from (f"    | {line}" for line in lines[:_MOST_LINES])
    if len(lines) > _MOST_LINES:
        yield f"    | … {len(lines) - _MOST_LINES} more lines (`--json` has them)"
