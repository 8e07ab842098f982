"""The ends of turns, and of rounds whose worker died.

The end of a turn is recorded once, in the transaction that leaves the turn without a round to run. If the
last round ended with a call that a person has to approve, or in which its program waits, the turn ends as
``waiting`` and names what it waits for. That does not end it a second time: it starts another turn.

A turn is open while one of its rounds is, or is merged into a round that is. The writers of rounds hold the
chat's lock, so of several rounds of a turn exactly one finds itself to be the last. A turn runs in several
processes and may wait for hours, so no process keeps a span open for it: the one that records its end also
records its span, under the id that its rounds have named as their parent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from nekro.app.approvals.shown import call_line, cut_line
from nekro.app.calls.waits import wait_json
from nekro.app.catalogue import WAIT_TASKS
from nekro.app.chats.writer import trace_of
from nekro.base.metrics import metrics
from nekro.broker.tracing import TurnTrace, end_turn, genai
from nekro.sandbox.models import STOPS, StopType
from nekro_agent.shared_clock import shared_time
from nekro_client.event_types import EventType
from storage.engine import Database
from storage.repositories.calls import Call
from storage.repositories.events import NewEvent
from storage.repositories.rounds import ClaimedRound, Round
from storage.states import CallState, RoundState, TriggerKind
from storage.transaction import Transaction

__all__ = [
    "TurnFault",
    "copied_fates",
    "fates_of",
    "interruption_of",
    "record_turn_spans",
    "turn_ends",
    "woken_by",
]


#: State of a turn that ends while its program waits, or a person has to decide;
#: ``nekro_client.models.TurnState.WAITING``.
TURN_WAITING: Final = "waiting"
#: Recorded calls of an interrupted program that the model reads.
_MOST_FATES: Final = 40


@dataclass(frozen=True, kw_only=True)
class TurnFault:
    """Why a turn failed: a stable code and a text."""

    code: str
    text: str


async def turn_ends(
    transaction: Transaction,
    ended: Sequence[Round],
    *,
    merged: Iterable[Round],
    following: ClaimedRound | None = None,
    fault: TurnFault | None = None,
    known_terms: Collection[str] = (),
) -> list[NewEvent]:
    """Return the events of the turns that the end of some rounds of one chat ends, and record it for lists.

    Call it after everything that the end of the rounds requests.

    Args:
        ended: rounds that have just ended.
        merged: the rounds that were merged into them.
        following: the chat's next round, if the transaction has started it. Everything that was requested is
            part of it, so no other turn is open.
        fault: why they failed, or why they ended their turn before its work was done; None if they did not.
        known_terms: terms that are recorded for the turn of each ended round.
    """
    if not ended:
        return []
    if following is None:
        open_turns = await transaction.rounds.open_turns(ended[0].chat_key)
    else:
        open_turns = {item.turn_id for item in following.triggers}
    by_id = {item.id: item for item in ended}
    last_rounds: dict[str, Round] = {}
    for item in ended:
        if item.turn_id not in open_turns:
            last_rounds[item.turn_id] = item
    for item in merged:
        if item.turn_id not in open_turns:
            last_rounds.setdefault(item.turn_id, by_id[item.merged_into or ""])
    for item in ended:
        await transaction.turn_search.add_round(item, known=known_terms)
    ends = []
    for turn_id, last in last_rounds.items():
        ends.append(_event(turn_id, last, fault, await _pending(transaction, last)))
        await transaction.turn_search.end_turn(turn_id, ends[-1].data["state"])
    return ends


async def _pending(transaction: Transaction, last: Round) -> dict[str, Any]:
    """Return what a turn waits for after its last round: ids of requests for approval, and other waits."""
    if last.state is not RoundState.DONE or last.stop_type not in (StopType.APPROVAL, StopType.WAITING):
        return {}
    approvals = await transaction.approvals.pending_of_turn(last.chat_key, last.turn_id)
    waits = await transaction.parked_programs.open_of_chat(last.chat_key, turn_id=last.turn_id)
    found = {"waits_for": approvals, "waits": list(map(wait_json, waits))}
    return {name: value for name, value in found.items() if value}


def _event(turn_id: str, last: Round, fault: TurnFault | None, pending: dict[str, Any]) -> NewEvent:
    data: dict[str, Any] = {"state": last.state.value}
    if pending:
        data = {"state": TURN_WAITING, **pending}
    if fault is not None and last.state is not RoundState.CANCELLED:
        data = {
            "state": RoundState.FAILED.value,
            "error": {"code": fault.code, "text": fault.text},
        }
    if last.turn_id != turn_id:
        data["merged_into"] = last.turn_id
    return NewEvent(type=EventType.TURN_ENDED, turn_id=turn_id, round_id=last.id, data=data)


async def record_turn_spans(database: Database, ends: Sequence[NewEvent]) -> None:
    """Record the turns whose ends were committed.

    Args:
        ends: their events, as ``turn_ends`` returns them.

    Raises:
        StorageUnavailableError: the database does not answer; nothing is recorded.
    """
    takers = {end.data["merged_into"] for end in ends if "merged_into" in end.data}
    async with database.read() as transaction:
        rounds = await transaction.rounds.rounds_of_turns(*{end.turn_id or "" for end in ends}, *takers)
    traces = {item.turn_id: trace_of(item) for item in rounds}
    for end in ends:
        own = [item for item in rounds if item.turn_id == end.turn_id]
        if own:
            _record(end, own, traces)


def _record(end: NewEvent, own: Sequence[Round], traces: dict[str, TurnTrace]) -> None:
    first = own[0]
    error = end.data.get("error", {}).get("code", "")
    taker = end.data.get("merged_into")
    ended_at = _ended_at(own)
    seconds = max(0.0, (ended_at - first.requested_at).total_seconds())
    metrics().gen_ai_turn_seconds.labels(genai.NEKRO, error).observe(seconds)
    root = first.root_turn_id
    end_turn(
        traces[first.turn_id],
        started_at=first.requested_at,
        ended_at=ended_at,
        ids={
            "turn_id": first.turn_id,
            "root_turn_id": root if root != first.turn_id else None,
            "cause": first.trigger_kind.value,
            "state": end.data["state"],
            "merged_into": taker,
            "rounds": sum(item.started_at is not None for item in own),
            # Not as the convention's usage of this span: viewers add up the tokens of all spans.
            "prompt_tokens": _sum(item.prompt_tokens for item in own),
            "answer_tokens": _sum(item.completion_tokens for item in own),
            "cost": sum(item.cost or 0.0 for item in own),
        },
        standard={
            genai.OPERATION: genai.INVOKE_AGENT,
            genai.PROVIDER: genai.NEKRO,
            genai.AGENT_NAME: genai.NEKRO,
            genai.CONVERSATION_ID: first.chat_key,
        },
        error_type=error or None,
        links=[traces[taker]] if taker in traces else [],
    )


def _ended_at(own: Sequence[Round]) -> datetime:
    # A round that was merged has "finished" when it was merged.
    known = [item.finished_at for item in own if item.finished_at is not None and item.merged_into is None]
    return max(known, default=shared_time())


def _sum(numbers: Iterable[int | None]) -> int:
    return sum(number or 0 for number in numbers)


async def woken_by(transaction: Transaction, rows: Sequence[Call]) -> StopType | None:
    """Return the stop type of a call whose result has requested the next round or will do so, else None."""
    for row in rows:
        if row.method in WAIT_TASKS and row.state is CallState.AWAITING:
            return StopType.WAITING
        if row.state is CallState.AWAITING or await transaction.approvals.of_call(row.id) is not None:
            return StopType.APPROVAL
        is_result = row.state is CallState.DONE and row.type in STOPS
        if is_result and await transaction.rounds.find_by_trigger(TriggerKind.CALL, row.id) is not None:
            return STOPS[row.type]
    return None


def interruption_of(rows: Sequence[Call]) -> str:
    """Return the text for the model: its program was interrupted, and the states of its recorded calls."""
    return (
        "The host that ran the program went down, perhaps in the middle of it; what it printed is lost. "
        f"What it did before may stand.{fates_of(rows)} Look at the chat before you repeat anything."
    )


def fates_of(rows: Sequence[Call]) -> str:
    """Return a sentence for each recorded call of a program, with its end; each begins with a space."""
    earlier = len(rows) - _MOST_FATES
    omitted = f" Of {len(rows)} calls, the last {_MOST_FATES}:" if earlier > 0 else ""
    return omitted + "".join(f" `{_called(row)}`: {_fate(row)}." for row in rows[-_MOST_FATES:])


def copied_fates(methods: Mapping[str, str]) -> str:
    """Return the same for calls that a program of another chat has made; methods by call id."""
    names = [method.rpartition(".")[2] for method in methods.values()]
    return "".join(f" `{name}`: done before, in another chat." for name in names[-_MOST_FATES:])


def _called(row: Call) -> str:
    name, message = row.method.rpartition(".")[2], row.invocation
    return name if message is None else call_line(name, message["invocation"].get("args", ""))


def _fate(row: Call) -> str:
    if row.state is CallState.DONE:
        text = (row.outcome or {}).get("text")
        return "done" if text is None else f"done: {cut_line(text)}"
    if row.state is CallState.AWAITING:
        return "waits" if row.method in WAIT_TASKS else "waits for approval"
    if row.state in (CallState.QUEUED, CallState.RUNNING):
        return "still running"
    if row.state is CallState.UNKNOWN:
        return "outcome unknown"
    return f"failed: {cut_line(row.error_message)}" if row.error_message else "failed"
