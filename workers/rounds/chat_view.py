"""What precedes a round: what its drain knows of the chat, the earlier rounds of its turn, and their results.

A drain reads its chat in full before its first round, then only what is new. Only the holder of a chat's
lease runs and ends its rounds, so the turn is extended from what the drain itself has written. Messages that
others write meanwhile are read before every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from typing import Final

from nekro.agent.model import HistoryMessage, HistorySummary, Observation, TurnRound
from nekro.app.calls.run_calls import CallRecord
from nekro.app.rounds.summaries import shown_message, summary_before
from nekro.sandbox.models import StopType
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import ChatInfo
from storage.accounts.spendings import PayingKey
from storage.engine import Database
from storage.repositories.calls import Call
from storage.repositories.rounds import ClaimedRound, Round
from storage.states import RoundState, TriggerKind
from storage.transaction import Transaction

__all__ = [
    "ChatHistory",
    "ChatView",
    "RoundPast",
    "TurnPast",
]


#: Turns before a decision that a prompt shows; the history has what was said in older ones.
_MOST_TURNS: Final = 8


@dataclass(frozen=True, kw_only=True)
class TurnPast:
    """The past of a claimed round.

    A round that merged other triggers answers several turns; the earlier rounds of all of them
    are shown, in order, so that the model can relate its results to them.
    """

    #: When the turn of the claimed round itself started; its time limit counts from here.
    started_at: datetime
    #: Sequence of the first round of that turn: what is older than the turn has a smaller one.
    first_sequence: int
    #: Finished rounds of the turns, in order.
    earlier: tuple[Round, ...]
    #: Results, in order, by the id of the round whose code made the call; None: unknown.
    observations: Mapping[str | None, Sequence[Observation]]

    @property
    def previous(self) -> tuple[TurnRound, ...]:
        """The earlier rounds with their results."""
        return tuple(
            _turn_round(item, number, self.observations.get(item.id, ()))
            for number, item in enumerate(self.earlier, start=1)
        )

    @property
    def loose(self) -> tuple[Observation, ...]:
        """Results that no earlier round caused.

        They come from runs of the command line, or from this round's own code if the round was restarted.
        """
        ids = {item.id for item in self.earlier}
        loose = (found for caller, found in self.observations.items() if caller not in ids)
        return tuple(chain.from_iterable(loose))

    @classmethod
    async def read(cls, transaction: Transaction, claimed: ClaimedRound) -> TurnPast:
        """Read the past of a claimed round."""
        found = await transaction.rounds.rounds_of_turns(claimed.round.turn_id)
        own = [item for item in found if item.turn_id == claimed.round.turn_id]
        triggers = [*claimed.triggers, *_merged_into(own, found)]
        turns = {item.turn_id for item in triggers} | await _continued(transaction, claimed, own)
        if turns != {claimed.round.turn_id}:
            found = await transaction.rounds.rounds_of_turns(*turns)
        earlier = [
            item
            for item in found
            if item.turn_id in turns
            and item.state is RoundState.DONE
            and item.sequence < claimed.round.sequence
        ]
        earlier = _without_continued(earlier)
        triggers += [*earlier, *_merged_into(earlier, found)]
        first = min((*own, claimed.round), key=lambda item: item.sequence)
        return cls(
            started_at=first.started_at or first.requested_at,
            first_sequence=first.sequence,
            earlier=tuple(earlier),
            observations=await _observations(transaction, triggers),
        )

    def then(self, ended: Round, calls: Sequence[CallRecord], claimed: ClaimedRound) -> TurnPast | None:
        """Return the past of the round that directly follows the round of this past.

        None if the new round has other triggers, merged rounds or an earlier attempt; then the past must
        be read.

        Args:
            ended: the round whose past this is.
            calls: the calls of its code.
        """
        following = claimed.round
        if claimed.merged or following.attempt > 1 or following.turn_id != ended.turn_id:
            return None
        earlier = (*self.earlier, ended)
        if (following.trigger_kind, following.trigger_id) == (TriggerKind.ROUND, ended.id):
            return replace(self, earlier=earlier)
        call = next((call for call in calls if call.call_id == following.trigger_id), None)
        if following.trigger_kind is not TriggerKind.CALL or call is None:
            return None
        found = [*self.observations.get(ended.id, ()), _observation(following, call)]
        return replace(self, earlier=earlier, observations={**self.observations, ended.id: found})


async def _continued(transaction: Transaction, claimed: ClaimedRound, own: Sequence[Round]) -> set[str]:
    """Return the turns that a decision on one of their calls continues in this turn."""
    first = min((*own, claimed.round), key=lambda item: item.sequence)
    began = {item.trigger_id for item in (first, *claimed.merged) if item.trigger_kind is TriggerKind.CALL}
    found = [await transaction.approvals.turns_before(call_id) for call_id in began]
    return {turn_id for turns in found for turn_id in turns[-_MOST_TURNS:]}


def _without_continued(rounds: Sequence[Round]) -> list[Round]:
    """Leave out rounds whose program a later one has gone on with, which shows it as a whole."""
    last = {item.program_id or item.id: item for item in rounds}
    return [item for item in rounds if last[item.program_id or item.id] is item]


def _merged_into(rounds: Sequence[Round], found: Sequence[Round]) -> list[Round]:
    ids = {item.id for item in rounds}
    return [item for item in found if item.merged_into in ids]


async def _observations(
    transaction: Transaction, triggers: Sequence[Round]
) -> dict[str | None, list[Observation]]:
    """Return the results among the triggers, in order, by the round whose code made the call."""
    found: dict[str | None, list[Observation]] = {}
    by_id = {item.id: item for item in triggers if item.trigger_kind is TriggerKind.CALL}
    calls = await transaction.calls.find_all({item.trigger_id for item in by_id.values()})
    for trigger in sorted(by_id.values(), key=lambda item: item.sequence):
        call = calls.get(trigger.trigger_id)
        caller = None if call is None else call.round_id
        found.setdefault(caller, []).append(_observation(trigger, call))
    return found


def _observation(trigger: Round, call: Call | CallRecord | None) -> Observation:
    # The row of the call may be missing: calls are deleted after some days, and the fleet may be down longer.
    kind = SandboxMethodType.AGENT if trigger.segments is None else SandboxMethodType.MULTIMODAL_AGENT
    return Observation(
        method="" if call is None else call.method.rpartition(".")[2],
        type=kind if call is None else call.type,
        text=trigger.observation or "",
        segments=trigger.segments,
        call_id=trigger.trigger_id,
    )


def _turn_round(item: Round, number: int, observations: Sequence[Observation]) -> TurnRound:
    return TurnRound(
        number=number,
        asked_at=item.started_at or item.requested_at,
        answer=item.answer or "",
        round_id=item.id,
        # A round that ended without an answer has no code either.
        code=item.code if item.answer is not None else "",
        # Only the end of a round that its own worker has not ended records no output.
        is_interrupted=item.output is None,
        methods=tuple(call["method"] for call in item.calls or ()),
        stop_type=StopType(item.stop_type if item.stop_type is not None else StopType.NORMAL),
        reason=item.error or "",
        output=item.output or "",
        observations=tuple(observations),
    )


@dataclass(frozen=True, kw_only=True)
class RoundPast:
    """Everything that precedes a round."""

    chat: ChatInfo
    #: The persona that is chosen for the chat; None means that of the settings.
    persona: str | None
    messages: Sequence[HistoryMessage]
    #: Covers older messages; the same one in all rounds of a turn, unless the history is changed.
    summary: HistorySummary | None
    turn: TurnPast
    #: The key that started the first of the round's turns that a key started, and pays; None: no key did.
    key: PayingKey | None
    #: The method whose call requested the round; None if another trigger did, or it is not known here.
    waking_method: str | None


class ChatHistory:
    """The messages that one drain has read; each of its rounds reads only newer ones."""

    def __init__(self, chat_key: str, *, most: int) -> None:
        """Start with an empty history.

        Args:
            most: number of newest messages to show.
        """
        self._chat_key = chat_key
        self._most = most
        #: By sequence, oldest first; None for messages that no prompt shows.
        self._known: dict[int, HistoryMessage | None] = {}
        self._revision = 0

    async def read(
        self, transaction: Transaction, *, revision: int, begins_turn: bool
    ) -> list[HistoryMessage]:
        """Return the newest messages in their current state, oldest first.

        Args:
            revision: ``ChatInfo.history_revision``; another one than before means that known messages
                were changed or deleted.
            begins_turn: whether old messages may be dropped. Within a turn the first ones stay, so that
                prompts begin alike and the endpoint's prompt cache is used, unless many are new.
        """
        if revision != self._revision:
            self._known.clear()
            self._revision = revision
        last = next(reversed(self._known), 0)
        rows = await transaction.messages.newest(self._chat_key, limit=self._most, since=last)
        # The last known message is returned again, unless the chat was reset or many messages are new.
        if last and (not rows or rows[0].sequence != last):
            self._known.clear()
            if len(rows) < self._most:
                rows = await transaction.messages.newest(self._chat_key, limit=self._most)
        self._known |= {row.sequence: shown_message(row) for row in rows}
        if begins_turn or len(self._known) > 2 * self._most:
            for sequence in list(self._known)[: -self._most]:
                del self._known[sequence]
        return [message for message in self._known.values() if message is not None]


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
        self._turn: TurnPast | None = None
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
            messages = await self._history.read(
                transaction, revision=chat.history_revision, begins_turn=claimed.round.number == 1
            )
            persona = await _persona(transaction, chat)
            key = await transaction.spendings.key_of_rounds(claimed.triggers)
            turn = turn or await TurnPast.read(transaction, claimed)
            summary = None
            if self._shows_summary:
                summary = await summary_before(transaction, self._chat_key, turn.started_at)
        self._turn, self._last = turn, None
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
