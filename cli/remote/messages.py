"""Messages and turns of the API as commands print them."""

from __future__ import annotations

from typing import Any

from nekro_agent.errors import LLMError
from nekro_client.models import Call, FilePart, ImagePart, Message, Round, Turn, TurnState

__all__ = ["describe_call", "describe_message", "describe_round", "failure_of"]


def describe_message(message: Message) -> dict[str, Any]:
    """Return one message as ``nekro history --json`` prints it."""
    files = [part.file for part in message.parts if isinstance(part, (FilePart, ImagePart))]
    return {
        "id": message.id,
        "at": message.created_at,
        "kind": message.kind,
        "sender": message.sender_name or message.sender_id,
        "text": message.text,
        "data": {"file_path": files[0].path} if files else None,
        "call_id": message.call_id,
        "plugin": getattr(message, "plugin", None),
    }


def describe_call(call: Call) -> dict[str, Any]:
    """Return one call of a round or run as commands print it."""
    known = call.model_dump(mode="json", exclude={"error", "state", "attempts", "arguments", "value"})
    return known | {"error": call.error and f"{call.error.code}: {call.error.text}"}


def describe_round(entry: Round, turn: Turn) -> dict[str, Any]:
    """Return one round as ``nekro history --trace --json`` prints it; what the API does not tell is None."""
    known = entry.model_dump(exclude={"cause", "calls", "error"})
    unknown = ("user", "merged_into", "answered_at", "cancel_requested_at", "prompt_chars", "observation")
    return {
        **dict.fromkeys(unknown),
        **known,
        "turn": turn.id,
        "trigger": entry.cause.kind,
        "trigger_id": entry.cause.id,
        "error": entry.error and entry.error.text,
        "calls": [describe_call(call) for call in entry.calls],
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
