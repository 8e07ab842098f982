"""Describe rounds and their calls: as lines of text, and as data for ``--json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from agent.extraction import text_beside_code
from cli.output import one_line
from nekro_agent.tools.visible_text import visible_lines

if TYPE_CHECKING:
    from storage.engine import Database
    from storage.repositories.rounds import Round

__all__ = ["calls_of", "describe_round", "round_lines"]

_TEXT_COLUMNS: Final = 100
#: Most lines of a program or its output in the text; ``--json`` has all.
_MOST_LINES: Final = 60

Calls = Sequence[Mapping[str, Any]]


async def calls_of(database: Database, rounds: Sequence[Round]) -> dict[str, list[dict[str, Any]]]:
    """Return the calls of each round by round id: its own record, completed from the ledger of calls."""
    from workers.calls.story import listed_calls

    async with database.read() as transaction:
        rows = {entry.id: await transaction.calls.of_round(entry.id) for entry in rounds}
        approvals = await transaction.approvals.of_calls(chain.from_iterable(rows.values()))
    return {entry.id: listed_calls(entry.calls or [], rows[entry.id], approvals) for entry in rounds}


def describe_round(entry: Round, calls: Calls) -> dict[str, Any]:
    """Return one round as ``--json --trace`` prints it."""
    return {
        "id": entry.id,
        "turn": entry.turn_id,
        "number": entry.number,
        "trigger": entry.trigger_kind.value,
        "trigger_id": entry.trigger_id,
        "state": entry.state.value,
        "stop_type": stop_name(entry),
        "exit_code": entry.exit_code,
        "attempt": entry.attempt,
        "worker": entry.worker,
        "user": entry.user_id,
        "merged_into": entry.merged_into,
        "requested_at": entry.requested_at,
        "started_at": entry.started_at,
        "answered_at": entry.answered_at,
        "finished_at": entry.finished_at,
        "cancel_requested_at": entry.cancel_requested_at,
        "prompt_chars": entry.prompt_chars,
        "model": entry.model,
        "prompt_tokens": entry.prompt_tokens,
        "completion_tokens": entry.completion_tokens,
        "cost": entry.cost,
        "answer": entry.answer,
        "code": entry.code,
        "output": entry.output,
        "observation": entry.observation,
        "error": entry.error,
        "calls": list(calls),
    }


def stop_name(entry: Round) -> str | None:
    """Name of the stop type; None while nothing has run."""
    from sandbox.models import StopType

    return None if entry.stop_type is None else StopType(entry.stop_type).name


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
        parts.append(f"{_figure(entry['prompt_tokens'])} + {_figure(entry['completion_tokens'])} tokens")
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
