"""Messages and ends of turns of the API as commands print them."""

from __future__ import annotations

from typing import Any

from nekro_agent.errors import LLMError
from nekro_client.models import Message, Turn, TurnState

__all__ = ["describe_message", "failure_of"]


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


def failure_of(turn: Turn) -> LLMError | None:
    """Return why a turn that has ended has not ended well; None if it has."""
    if turn.state not in (TurnState.FAILED, TurnState.CANCELLED):
        return None
    verb = "failed" if turn.state is TurnState.FAILED else "was cancelled"
    last = turn.rounds[-1].number if turn.rounds else 1
    return LLMError(
        f"the turn {verb} in round {last}: {turn.error.text if turn.error else 'no reason is recorded'}"
    )
