"""The answer of a turn: what the agent sent to the chat, in order, and how the turn ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from fastapi import Request

from gateway.api.links import link_to
from gateway.identity import Identity
from gateway.streams.hub import EventHub
from gateway.streams.turns import turn_events
from nekro_agent.ports import MessageKind
from nekro_client.models import Event, EventType, TurnState
from storage.repositories.messages import Message
from storage.repositories.rounds import Round
from storage.states import FINAL_ROUND_STATES
from workers.chats.attachments import attachments_of
from workers.composition import Services

__all__ = ["QUEUED_SECONDS", "AnswerEnd", "AnswerReader", "Piece", "Usage"]

#: How long a turn may wait for a worker, before the time limit of the turn itself begins.
QUEUED_SECONDS: Final = 60


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of the rounds of a turn; 0 where the model's server reports none."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, prompt: int | None, completion: int | None) -> Usage:
        """Return it with the tokens of one more round."""
        return Usage(
            prompt_tokens=self.prompt_tokens + (prompt or 0),
            completion_tokens=self.completion_tokens + (completion or 0),
        )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A message of the agent: its text, or a link to its file."""

    message_id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class AnswerEnd:
    """The end of a turn."""

    #: ``done``, ``failed`` or ``cancelled``.
    state: str
    #: Why it failed: code and text; None if it did not.
    error: tuple[str, str] | None
    usage: Usage
    at: datetime | None = None


class AnswerReader:
    """Reads answers for one request."""

    def __init__(self, request: Request, services: Services, hub: EventHub) -> None:
        """Links in answers have the address that ``request`` names."""
        self._base_url = str(request.base_url)
        self._owner: Identity = request.state.identity
        self._services, self._hub, self._ids = services, hub, services.file_ids

    async def read(self, turn_id: str) -> AsyncGenerator[Piece | AnswerEnd, None]:
        """Yield the messages of a turn as they are sent, then its end.

        They end without it if this gateway stops, or the key of the request is no longer valid.

        The same turn yields the same at each reading, on every gateway.

        Raises:
            NotFoundError: there is no such turn, or its rounds were deleted.
            SlowReaderError: as from ``EventHub.stream``.
        """
        usage = Usage()
        async with aclosing(
            turn_events(self._hub, self._services.database, turn_id, owner=self._owner)
        ) as events:
            async for item in events:
                event = item.event
                if event.type in (EventType.MESSAGE_SENT, EventType.FILE_SENT):
                    yield self._piece(event)
                elif event.type == EventType.ROUND_ENDED:
                    data = event.data
                    usage = usage.plus(data.get("prompt_tokens"), data.get("completion_tokens"))
                elif event.type == EventType.TURN_ENDED and event.turn_id == turn_id:
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
            return bool(await transaction.events.of_turn(turn_id, limit=1))

    async def so_far(self, turn_id: str) -> list[Piece]:
        """Return the messages of a turn that has not ended, without waiting for more."""
        async with self._services.database.read() as transaction:
            rows = await transaction.messages.of_turn(turn_id)
        return [self._of_row(row) for row in rows if row.kind is MessageKind.ASSISTANT]

    async def _from_rows(self, turn_id: str) -> AsyncGenerator[Piece | AnswerEnd, None]:
        """Read a turn whose events retention has deleted."""
        async with self._services.database.read() as transaction:
            first = await transaction.rounds.get(turn_id)
            rounds = await transaction.rounds.rounds_of_turns(turn_id)
            messages = await transaction.messages.of_turn(turn_id)
        for row in messages:
            if row.kind is MessageKind.ASSISTANT:
                yield self._of_row(row)
        usage = Usage()
        for item in rounds:
            usage = usage.plus(item.prompt_tokens, item.completion_tokens)
        yield _end_of_rows(rounds[-1] if rounds else first, usage)

    def _piece(self, event: Event) -> Piece:
        text = self._text(
            event.chat_key, str(event.data.get("text") or ""), {**event.data, "content_data": None}, event.at
        )
        return Piece(message_id=event.message_id or "", text=text)

    def _of_row(self, row: Message) -> Piece:
        text = self._text(row.chat_key, row.text, row.data or {}, row.created_at)
        return Piece(message_id=row.id, text=text)

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


def _end(event: Event, usage: Usage) -> AnswerEnd:
    error = event.data.get("error")
    return AnswerEnd(
        state=str(event.data.get("state") or TurnState.DONE.value),
        error=(str(error.get("code")), str(error.get("text"))) if isinstance(error, Mapping) else None,
        usage=usage,
        at=event.at,
    )


def _end_of_rows(last: Round, usage: Usage) -> AnswerEnd:
    state = last.state.value
    return AnswerEnd(
        state=state if state in ("failed", "cancelled") else "done",
        error=("round_failed", last.error or "the round failed") if state == "failed" else None,
        usage=usage,
        at=last.finished_at,
    )
