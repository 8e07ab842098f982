"""Messages and turns of the API as commands print them."""

from __future__ import annotations

from typing import Any, Final

from nekro_agent.errors import LLMError
from nekro_client.models import Call, Message, Round, Turn, TurnError, TurnState

__all__ = ["describe_call", "describe_message", "describe_round", "failure_of"]

_TIMES: Final = ("requested_at", "started_at", "finished_at")
#: What only the tree of a turn has.
_OF_TREE: Final = ("attempts", "prompted_at", "model_group", "model_tries", "tool_calls_kept")
_OF_TREE_CALLS: Final = {
    "error", "state", "attempts", "arguments", "value", "line", "round_attempt"
}  # fmt: skip


def describe_message(message: Message) -> dict[str, Any]:
    """Return one message as ``nekro history --json`` prints it."""
    return {
        "id": message.id,
        "at": message.created_at,
        "kind": message.kind,
        "sender": message.sender_name or message.sender_id,
        "text": message.text,
        "data": message.data,
        "call_id": message.call_id,
        "plugin": message.plugin,
    }


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
            "awaits_approval": call.state == "awaiting",
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


def _error_text(error: TurnError) -> str:
    """Return ``<type>: <message>``; the API has the whole text where there is no message."""
    whole = (error.code, f"{error.code}: ")
    return error.text if error.text in whole else f"{error.code}: {error.text}"


def failure_of(turn: Turn) -> LLMError | None:
    """Return why a turn that has ended has not ended well; None if it has."""
    if turn.state not in (TurnState.FAILED, TurnState.CANCELLED):
        return None
    verb = "failed" if turn.state is TurnState.FAILED else "was cancelled"
    last = turn.rounds[-1].number if turn.rounds else 1
    return LLMError(
        f"the turn {verb} in round {last}: {turn.error.text if turn.error else 'no reason is recorded'}"
    )
