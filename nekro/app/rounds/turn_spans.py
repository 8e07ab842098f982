"""The spans and durations of whole turns, recorded when they have ended.

A turn runs in several processes and may wait for hours, so no process keeps a span open for it: the one that
records its end also records its span, under the id that its rounds have named as their parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from nekro.app.chats.turn_traces import trace_of
from nekro.base.metrics import metrics
from nekro.broker.tracing import TurnTrace, end_turn, genai
from nekro_agent.shared_clock import shared_time
from storage.engine import Database
from storage.repositories.events import NewEvent
from storage.repositories.rounds import Round

__all__ = ["record_turn_spans"]


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
