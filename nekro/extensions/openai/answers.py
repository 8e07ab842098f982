"""The answer of a turn: what the agent sends to the chat, in order, and how the turn ends.

A message can also be read while the model writes it: as `Words`, then as the `Piece` that begins with them.
Words that are in no message, such as text before a program, are a piece of their own, a preface.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from fastapi import Request

from nekro.app.chats.attachments import attachments_of
from nekro.app.services import Services
from nekro.gateway.api.files import link_to
from nekro.gateway.streams.hub import EventHub
from nekro.gateway.streams.turns import turn_events
from nekro.operations.actor import Identity
from nekro_agent.ports import MessageKind
from nekro_client.models import Event, EventType, TurnState
from nekro_client.sse import LiveMessage, is_restart
from storage.repositories.messages import Message
from storage.repositories.rounds import Round
from storage.states import FINAL_ROUND_STATES

__all__ = [
    "QUEUED_SECONDS",
    "AnswerEnd",
    "AnswerReader",
    "Part",
    "Piece",
    "ProgramStep",
    "TurnUsage",
    "Words",
]

#: How long a turn may wait for a worker, before the time limit of the turn itself begins.
QUEUED_SECONDS: Final = 60


@dataclass(frozen=True, kw_only=True)
class TurnUsage:
    """Tokens of the rounds of a turn."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Rounds whose tokens are an estimate, because the model's server reported no possible number.
    estimated_requests: int = 0

    def plus(self, prompt: int | None, completion: int | None, *, is_estimated: bool) -> TurnUsage:
        """Return it with the tokens of one more round."""
        return TurnUsage(
            prompt_tokens=self.prompt_tokens + (prompt or 0),
            completion_tokens=self.completion_tokens + (completion or 0),
            estimated_requests=self.estimated_requests + is_estimated,
        )

    @property
    def mark(self) -> dict[str, int]:
        """The field that marks an estimate in the protocols' objects; none without one.

        It is a number, as the protocols' fields are, for clients that read an object of numbers.
        """
        return {"estimated_requests": self.estimated_requests} if self.estimated_requests else {}


@dataclass(frozen=True, kw_only=True)
class Words:
    """More words of the next piece, whose text begins with them."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A message of the agent: its text, or a link to its file."""

    text: str
    #: Whether it is no message: words that were shown while the model wrote them, and withdrawn.
    is_preface: bool = False


@dataclass(frozen=True, kw_only=True)
class ProgramStep:
    """What the agent does besides talking: a program before it runs, or a method that it calls."""

    round_id: str
    code: str = ""
    method: str = ""


@dataclass(frozen=True, kw_only=True)
class AnswerEnd:
    """The end of a turn."""

    #: ``done``, ``waiting`` (for a person), ``failed`` or ``cancelled``.
    state: str
    #: Why it failed: code and text; None if it did not.
    error: tuple[str, str] | None
    usage: TurnUsage
    at: datetime | None = None


Part = Words | Piece | ProgramStep | AnswerEnd


class AnswerReader:
    """Reads answers for one request."""

    def __init__(self, request: Request, services: Services, hub: EventHub) -> None:
        """Links in answers have the address that ``request`` names."""
        self._base_url = str(request.base_url)
        self._owner: Identity = request.state.identity
        self._services, self._hub, self._ids = services, hub, services.file_ids

    async def read(self, turn_id: str, *, with_live: bool = False) -> AsyncGenerator[Part, None]:
        """Yield the messages and programs of a turn as they come, then its end.

        They end without it if this gateway stops, or the key of the request is no longer valid.

        The same turn yields the same at each reading, on every gateway, but for words.

        Args:
            with_live: also the words of messages as they are written.

        Raises:
            NotFoundError: there is no such turn, or its rounds were deleted.
            SlowReaderError: as from ``EventHub.stream``.
        """
        usage, parts = TurnUsage(), _Parts(self)
        database, owner = self._services.database, self._owner
        stream = turn_events(self._hub, database, turn_id, owner=owner, with_live=with_live)
        async with aclosing(stream) as events:
            async for item in events:
                event = item.event
                for part in parts.of(event):
                    yield part
                if event.type == EventType.ROUND_ENDED:
                    data = event.data
                    usage = usage.plus(
                        data.get("prompt_tokens"),
                        data.get("completion_tokens"),
                        is_estimated=bool(data.get("tokens_estimated")),
                    )
                elif event.type == EventType.TURN_ENDED and event.turn_id == turn_id:
                    for part in parts.last():
                        yield part
                    yield _end(event, usage)
                    return
        if not await self._has_events(turn_id):
            async for part in self._from_rows(turn_id):
                yield part

    async def state(self, turn_id: str) -> str:
        """Return ``queued`` or ``in_progress`` for a turn that has not ended."""
        async with self._services.database.read() as transaction:
            first = await transaction.rounds.get(turn_id)
        return "queued" if first.started_at is None else "in_progress"

    async def has_ended(self, turn_id: str) -> bool:
        """Whether a turn has ended."""
        async with self._services.database.read() as transaction:
            if await transaction.events.end_of_turn(turn_id) is not None:
                return True
            first = await transaction.rounds.get(turn_id)
        return first.state in FINAL_ROUND_STATES and not await self._has_events(turn_id)

    async def _has_events(self, turn_id: str) -> bool:
        """Whether the events of a turn are kept; retention deletes them some time after its end."""
        async with self._services.database.read() as transaction:
            return await transaction.events.begin_of_turn(turn_id) is not None

    async def so_far(self, turn_id: str) -> list[Piece]:
        """Return the messages of a turn that has not ended, without waiting for more."""
        async with self._services.database.read() as transaction:
            rows = await transaction.messages.of_turn(turn_id)
        return [self._of_row(row) for row in rows if row.kind is MessageKind.ASSISTANT]

    async def _from_rows(self, turn_id: str) -> AsyncGenerator[Part, None]:
        """Read a turn whose events retention has deleted."""
        async with self._services.database.read() as transaction:
            first = await transaction.rounds.get(turn_id)
            rounds = await transaction.rounds.rounds_of_turns(turn_id)
            messages = await transaction.messages.of_turn(turn_id)
        for row in messages:
            if row.kind is MessageKind.ASSISTANT:
                yield self._of_row(row)
        usage = TurnUsage()
        for item in rounds:
            usage = usage.plus(
                item.prompt_tokens, item.completion_tokens, is_estimated=bool(item.tokens_estimated)
            )
        yield _end_of_rows(rounds[-1] if rounds else first, usage)

    def piece(self, event: Event) -> Piece:
        """Return the message of an event."""
        text = self._text(
            event.chat_key, str(event.data.get("text") or ""), {**event.data, "content_data": None}, event.at
        )
        return Piece(text=text)

    def _of_row(self, row: Message) -> Piece:
        text = self._text(row.chat_key, row.text, row.data or {}, row.created_at)
        return Piece(text=text)

    def _text(self, chat_key: str, text: str, data: Mapping[str, Any], at: datetime) -> str:
        """Return a message as Markdown, its files as links."""
        lines = [text] if text else []
        for file in attachments_of(data):
            url = link_to(
                self._ids, self._base_url, chat_key, file, sent_at=at, kept=self._services.settings.retention
            )
            name = file.name.replace("[", "(").replace("]", ")").replace("\n", " ")
            lines.append(f"{'!' if file.kind == 'image' else ''}[{name}]({url})")
        return "\n".join(lines)


class _Parts:
    """Translates the events of one turn."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._live = LiveMessage()
        #: Messages of others that came while words of a message had been shown.
        self._held: list[Piece] = []

    def of(self, event: Event) -> Iterator[Part]:
        """Yield what an event adds to the answer."""
        if event.type == EventType.MESSAGE_DELTA:
            if text := self._live.add(event.round_id, event.data):
                yield Words(text=text)
        elif event.type in (EventType.MESSAGE_SENT, EventType.FILE_SENT):
            piece = self._reader.piece(event)
            if self._live.round_id not in (None, event.round_id):
                self._held.append(piece)
            else:
                yield from self._settled(event.round_id, piece)
        elif event.type == EventType.MESSAGE_WITHDRAWN:
            piece = Piece(text=str(event.data.get("text") or ""), is_preface=True)
            yield from self._settled(event.round_id, piece)
        elif event.type == EventType.ROUND_ENDED or is_restart(event):
            yield from self._settled(event.round_id, None, goes_on=is_restart(event))
        elif event.type == EventType.CODE_READY and event.data.get("code"):
            yield ProgramStep(round_id=event.round_id or "", code=str(event.data["code"]))
        elif event.type == EventType.CALL_STARTED:
            yield ProgramStep(round_id=event.round_id or "", method=str(event.data.get("method") or ""))

    def last(self) -> Iterator[Part]:
        """Yield what is left at the end of the turn."""
        yield from self._settled(self._live.round_id, None)

    def _settled(self, round_id: str | None, piece: Piece | None, *, goes_on: bool = False) -> Iterator[Part]:
        """Yield a piece, after the words that a round has shown if it does not begin with them."""
        shown = self._live.settle(round_id, goes_on=goes_on)
        if shown and (piece is None or not piece.text.startswith(shown)):
            yield Piece(text=shown, is_preface=True)
        if piece is not None:
            yield piece
        if self._live.round_id is None:
            yield from self._held
            self._held.clear()


def _end(event: Event, usage: TurnUsage) -> AnswerEnd:
    error = event.data.get("error")
    return AnswerEnd(
        state=str(event.data.get("state") or TurnState.DONE.value),
        error=(str(error.get("code")), str(error.get("text"))) if isinstance(error, Mapping) else None,
        usage=usage,
        at=event.at,
    )


def _end_of_rows(last: Round, usage: TurnUsage) -> AnswerEnd:
    state = last.state.value
    return AnswerEnd(
        state=state if state in ("failed", "cancelled") else "done",
        error=("round_failed", last.error or "the round failed") if state == "failed" else None,
        usage=usage,
        at=last.finished_at,
    )
