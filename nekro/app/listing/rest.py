"""The answers of `read_rest`: texts that a prompt shows cut, from the rows that they came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nekro.agent.model import TextPart
from nekro.agent.multimodal import render_segments
from nekro.sandbox.models import StopType
from nekro_agent.errors import ArgumentError
from storage.repositories.rounds import Round
from storage.states import TriggerKind
from storage.transaction import Transaction

__all__ = ["MOST_CHARS", "rest_of"]

#: Most characters of one answer.
MOST_CHARS: Final = 1_000_000


async def rest_of(
    transaction: Transaction, chat_key: str, handle: object, *, start: object, most: object
) -> str:
    """Return ``most`` characters from ``start`` of the text that a handle of ``nekro.agent.text``
    names.

    Raises:
        ArgumentError: the chat has no such text, or no longer; an argument is not a number in its range.
    """
    begin = _number("start", start, least=0)
    length = _number("most", most, least=1, largest=MOST_CHARS)
    text = await _find(transaction, chat_key, handle) if isinstance(handle, str) else None
    if text is None:
        raise ArgumentError(f"read_rest: this chat has no text {str(handle)[:80]!r}, or has deleted it")
    return text[begin : begin + length]


async def _find(transaction: Transaction, chat_key: str, handle: str) -> str | None:
    kind, _, name = handle.partition(":")
    if kind == "message":
        message = await transaction.messages.find(name)
        is_ours = message is not None and message.chat_key == chat_key and not message.is_hidden
        return message.text if message is not None and is_ours else None
    name, _, part = name.partition("#")
    found, text_of = await _round(transaction, kind, name)
    if found is None or found.chat_key != chat_key:
        return None
    return text_of(found, part)


async def _round(
    transaction: Transaction, kind: str, name: str
) -> tuple[Round | None, Callable[[Round, str], str | None]]:
    if kind == "round":
        return await transaction.rounds.find(name), _output
    if kind == "call":
        return await transaction.rounds.find_by_trigger(TriggerKind.CALL, name), _result
    return None, _output


def _output(found: Round, part: str) -> str | None:
    # Prompts do not show this output either: it may contain the confidential text itself.
    return None if part or found.stop_type == StopType.SECURITY else found.output


def _result(found: Round, part: str) -> str | None:
    if not part:
        return found.observation
    parts = render_segments(found.segments, image_bytes=0) if found.segments is not None else []
    shown = parts[int(part)] if part.isdecimal() and len(part) < 4 and int(part) < len(parts) else None
    return shown.text if isinstance(shown, TextPart) else None


def _number(name: str, value: object, *, least: int, largest: int | None = None) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, int) or not is_number or value < least or (largest and value > largest):
        reach = f"from {least} to {largest}" if largest else f">= {least}"
        raise ArgumentError(f"read_rest: {name}={str(value)[:80]} must be a number {reach}")
    return value
