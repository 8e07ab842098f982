"""What one drain knows of its chat: read in full before its first round, then only what is new.

Only the holder of a chat's lease runs and ends its rounds, so the turn is extended from what the
drain itself has written. Messages that others write meanwhile are read before every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nekro.agent.model import HistoryMessage, HistorySummary
from nekro.app.calls.dispatch import CallRecord
from nekro.app.rounds.chat_history import ChatHistory
from nekro.app.rounds.summaries import summary_before
from nekro_agent.ports import ChatInfo
from storage.accounts.spendings import PayingKey
from storage.engine import Database
from storage.repositories.rounds import ClaimedRound, Round
from storage.transaction import Transaction
from workers.rounds.turns import Turn

__all__ = ["ChatView", "RoundPast"]


@dataclass(frozen=True, kw_only=True)
class RoundPast:
    """Everything that precedes a round."""

    chat: ChatInfo
    #: The persona that is chosen for the chat; None means that of the settings.
    persona: str | None
    messages: Sequence[HistoryMessage]
    #: Covers older messages; the same one in all rounds of a turn, unless the history is changed.
    summary: HistorySummary | None
    turn: Turn
    #: The key that started the first of the round's turns that a key started, and pays; None: no key did.
    key: PayingKey | None
    #: The method whose call requested the round; None if another trigger did, or it is not known here.
    waking_method: str | None


class ChatView:
    """The view of one drain, under one lease."""

    def __init__(self, chat_key: str, *, most_messages: int, shows_summary: bool = False) -> None:
        """Start without data.

        Args:
            most_messages: as in ``ChatHistory``.
            shows_summary: whether the settings ask for summaries.
        """
        self._chat_key = chat_key
        self._history = ChatHistory(chat_key, most=most_messages)
        self._shows_summary = shows_summary
        self._turn: Turn | None = None
        #: Whether a key pays for the turn; a turn that goes on gets no other one.
        self._has_key = False
        self._last: tuple[Round, Sequence[CallRecord]] | None = None

    @property
    def earlier(self) -> Sequence[Round]:
        """The finished rounds before the round that was read last."""
        return self._turn.earlier if self._turn else ()

    def round_ended(self, ended: Round, calls: Sequence[CallRecord]) -> None:
        """Record how the round that was read last has ended."""
        self._last = (ended, calls)

    async def read(self, database: Database, claimed: ClaimedRound) -> RoundPast:
        """Return what came before a round that was just started."""
        turn = self._turn.then(*self._last, claimed) if self._turn and self._last else None
        calls = self._last[1] if self._last else ()
        waking = next((call.method for call in calls if call.call_id == claimed.round.trigger_id), None)
        async with database.read() as transaction:
            chat = claimed.chat or await transaction.chats.get(self._chat_key)
            messages = await self._history.read(transaction, revision=chat.history_revision)
            persona = await _persona(transaction, chat)
            key = None
            if turn is None or self._has_key:
                turn_ids = list(dict.fromkeys(trigger.turn_id for trigger in claimed.triggers))
                key = await transaction.spendings.paying_key(turn_ids)
            turn = turn or await Turn.read(transaction, claimed)
            summary = None
            if self._shows_summary:
                summary = await summary_before(transaction, self._chat_key, turn.started_at)
        self._turn, self._last, self._has_key = turn, None, key is not None
        return RoundPast(
            chat=chat,
            persona=persona,
            messages=messages,
            summary=summary,
            turn=turn,
            key=key,
            waking_method=waking,
        )


async def _persona(transaction: Transaction, chat: ChatInfo) -> str | None:
    if chat.preset_id is None:
        return None
    chosen = await transaction.records.presets(preset_id=chat.preset_id, limit=1)
    return chosen[0].content if chosen else None
