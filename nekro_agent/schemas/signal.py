"""Signals that message hooks return to decide what happens to a message."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

__all__ = ["MsgSignal", "merge_signals"]


class MsgSignal(IntEnum):
    """Answer of ``on_user_message`` and ``on_system_message`` hooks; None means CONTINUE."""

    #: Trigger the agent, whatever the message.
    FORCE_TRIGGER = -1
    #: No special handling.
    CONTINUE = 0
    #: Record the message, but do not trigger the agent.
    BLOCK_TRIGGER = 1
    #: Drop the message.
    BLOCK_ALL = 2


def merge_signals(signals: Iterable[MsgSignal | None]) -> MsgSignal:
    """Return the merged answer of several hooks: BLOCK_ALL, else FORCE_TRIGGER, else the strongest."""
    given = [signal for signal in signals if signal is not None]
    if MsgSignal.BLOCK_ALL in given:
        return MsgSignal.BLOCK_ALL
    if MsgSignal.FORCE_TRIGGER in given:
        return MsgSignal.FORCE_TRIGGER
    return max(given, default=MsgSignal.CONTINUE)
