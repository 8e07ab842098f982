"""The events of one attempt at a round, on their way to the database.

They are buffered and appended in batches, because a TOOL call must not cost a transaction: by a timer while
something waits, and at the latest by the transaction that ends the round. A worker that dies loses what it
has buffered, which is at most ``REFRESH_SECONDS`` old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, Final

from loguru import logger
from pydantic_core import from_json

from nekro.agent.llm.port import LLMAnswer, LLMRequest
from nekro.agent.llm.telemetry import message_json
from nekro.app.calls.run_calls import CallRecord
from nekro.app.chats.events import LiveText, live_event, record
from nekro.app.chats.publisher import EventPublisher
from nekro.broker.tracing.genai import content_text
from nekro.plugins.entries import MethodEntry
from nekro.sandbox.models import StubCall
from nekro.wire.invocation import Envelope
from nekro_agent.durations import POLL_SECONDS, REFRESH_SECONDS, RETRY_SECONDS
from nekro_agent.errors import FencedError, StorageError
from nekro_agent.shared_clock import shared_time
from nekro_client.event_types import EventType
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.engine import Database
from storage.repositories.events import NewEvent
from storage.repositories.rounds import Round
from storage.states import StoredKind
from storage.transaction import Transaction

__all__ = ["FLUSH_SECONDS", "AttemptEvents"]

#: How long an event waits for others; while events go on, the pause between two batches is longer, because
#: a batch on SQLite keeps all other writers waiting.
FLUSH_SECONDS: Final = POLL_SECONDS
#: That longer pause: readers see a busy round a moment late.
_PAUSE_SECONDS: Final = REFRESH_SECONDS
#: Arguments and results with a longer text are not kept; the event has their length.
_MOST_BYTES: Final = 4_000


class _Waiting:
    """An event whose arguments or result are read when it is written, off the call's way."""

    def __init__(self, event: NewEvent, values: Mapping[str, bytes], redact: Callable[[str], str]) -> None:
        self._event, self._values, self._redact = event, values, redact

    @cached_property
    def event(self) -> NewEvent:
        """The event with its values."""
        for name, text in self._values.items():
            self._event.data.update(_kept(name, text, self._redact))
        return self._event


class AttemptEvents:
    """Collects what happens in an attempt; used on one event loop.

    It is the ``CallObserver`` of the round's calls.
    """

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        round_: Round,
        *,
        fence: int,
        keeps_prompts: bool = False,
        redact: Callable[[str], str] = str,
    ) -> None:
        """Create it for a round that was just started.

        Args:
            fence: fencing token of the chat's lease.
            keeps_prompts: whether prompts are stored.
            redact: removes secrets and host paths from arguments, results and prompts.
        """
        self._database = database
        self._publisher = publisher
        self._round = round_
        self._fence = fence
        self._redact = redact
        self._keeps_prompts = keeps_prompts
        #: As ``PromptRepository.keep`` takes it, until it is written.
        self._prompt: str | None = None
        self._waiting: list[_Waiting] = []
        #: Whether a transaction took what waits and its commit was not reported, so the outcome is unknown.
        self._is_in_doubt = False
        self._is_closed = False
        #: Events of calls that an earlier attempt has recorded: type and call.
        self._recorded: Collection[tuple[str, str | None]] = ()
        #: Whether output is not shown, because an earlier attempt has shown it.
        self._is_shown_before: Callable[[], bool] = lambda: False
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        #: When the next batch may be written, by ``time.monotonic``.
        self._next_at = 0.0
        self._flushing: asyncio.Task[None] | None = None
        self._answer = LiveText(partial(self._publish_live, EventType.MODEL_DELTA))
        #: The try whose answer arrives.
        self._answer_of = 0
        self._output = LiveText(partial(self._publish_live, EventType.OUTPUT_CHUNK))
        self._words = LiveText(partial(self._publish_live, EventType.MESSAGE_DELTA), repeats=True)
        #: The words that readers were shown.
        self._shown: list[str] = []
        #: The request whose words arrive, the words shown before it, and how many characters of these it has
        #: repeated; None: it says something else.
        self._words_of, self._repeating = 0, ""
        self._repeated: int | None = 0

    async def resume(self, is_repeating: Callable[[], bool]) -> None:
        """Record and show only what an earlier attempt at the round has not.

        Args:
            is_repeating: whether its program does what it did then.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        async with self._database.read() as transaction:
            found = await transaction.events.of_turn(self._round.turn_id)
        self._recorded = {(event.type, event.call_id) for event in found if event.round_id == self._round.id}
        self._is_shown_before = is_repeating

    def model_requested(self, request: LLMRequest) -> None:
        """The prompt is sent to the model."""
        if self._keeps_prompts:
            self._prompt = content_text([message_json(item) for item in request.messages], self._redact)
        self._add(EventType.MODEL_REQUESTED, data={"prompt_chars": request.chars})

    def model_delta(self, number: int, text: str) -> None:
        """Receive the next piece of the model's answer to a request; requests count from 1."""
        if self._answer_of != number:
            self._answer_of = number
            self._answer.begin({"try": number})
        self._answer.add(text)

    def words(self, number: int, text: str) -> None:
        """Receive the next piece of the words for people in the answer to that request.

        Readers are shown one text that only grows: the words of another request go on where those before end
        if they repeat them, and are not shown if they do not.
        """
        if self._words_of != number:
            self._words_of, self._repeating, self._repeated = number, "".join(self._shown), 0
        if self._repeated is None:
            return
        again = self._repeating[self._repeated : self._repeated + len(text)]
        if not text.startswith(again):
            self._repeated = None
            return
        self._repeated += len(again)
        if new := text[len(again) :]:
            self._shown.append(new)
            self._words.add(new)

    def settle_words(self, words: str | None) -> None:
        """The round sends these words, or none; what readers were shown beyond them is withdrawn."""
        self._words.flush()
        shown = "".join(self._shown)
        self._shown.clear()
        if shown and not (words or "").startswith(shown):
            self._add(EventType.MESSAGE_WITHDRAWN, data={"text": shown})

    def code_ready(self, code: str, llm: LLMAnswer) -> None:
        """Record that the model's answer is not a message."""
        self._answer.flush()
        self.settle_words(None)
        data = {
            "code": code,
            "model": llm.model,
            "group": llm.group,
            "failed_groups": [
                {"group": one.group, "model": one.model, "code": one.code} for one in llm.failed
            ],
            "tries": llm.tries,
            "prompt_tokens": llm.prompt_tokens,
            "completion_tokens": llm.answer_tokens,
            "tokens_estimated": llm.is_estimated,
            "cost": llm.cost,
        }
        self._add(EventType.CODE_READY, data=data)

    def output(self, text: str) -> None:
        """The code has printed."""
        if not self._is_shown_before():
            self._output.add(text)

    def call_started(self, entry: MethodEntry, call: StubCall, *, lane: str) -> None:
        """A call is about to be sent."""
        data: dict[str, Any] = {"method": entry.task, "type": entry.type.value, "lane": lane}
        if call.line is not None:
            data["line"] = call.line
        values = {"arguments": call.arguments}
        self._add(EventType.CALL_STARTED, call_id=call.call_id, data=data, values=values)

    def call_ended(self, call: CallRecord, envelope: Envelope | None) -> None:
        """A call has ended, or its caller waits no longer."""
        data: dict[str, Any] = {
            "method": call.method,
            "type": call.type.value,
            "state": _state_of(call),
            "worker": call.worker,
            "duration_ms": round(call.duration_ms, 3),
            "error": call.error,
            "follow_up": call.round_id,
        }
        values = {}
        if envelope is not None and envelope.value is not None:
            values["value"] = envelope.value_bytes()
        elif envelope is not None and envelope.text is not None:
            data["value"] = self._redact(envelope.text)[:_MOST_BYTES]
        self._add(EventType.CALL_ENDED, call_id=call.call_id, data=data, values=values)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Let no batch be written during the block, which writes the events itself with ``take``."""
        async with self._writing:
            for waiting in self._waiting:  # before the transaction, which keeps other writers waiting
                _ = waiting.event
            yield

    async def take(self, transaction: Transaction, *, later: bool = False) -> None:
        """Append what waits with a transaction, inside ``held``; it is dropped here after the commit.

        Args:
            later: see ``nekro.app.chats.events.record``.
        """
        for text in (self._answer, self._output, self._words):
            text.flush()
        count = len(self._waiting)
        events = [waiting.event for waiting in self._waiting]
        if self._is_in_doubt:
            events = await self._missing(transaction, events)
        self._is_in_doubt = True  # a stop may come during the commit
        if (prompt := self._prompt) is not None:
            await transaction.prompts.keep(self._round.id, prompt)
            size = ROW_BYTES + size_of(prompt)
            transaction.stored_bytes.add(self._round.turn_id, StoredKind.PROMPTS, size, refuses=False)
        if events:
            record(transaction, self._publisher, self._round.chat_key, *events, later=later)

        async def written() -> None:
            del self._waiting[:count]
            if self._prompt is prompt:
                self._prompt = None
            self._is_in_doubt = False

        transaction.after_commit(written)

    async def close(self) -> None:
        """Drop what waits, and wait until nothing is written any more."""
        self._is_closed = True
        self._waiting.clear()
        self._prompt = None
        for text in (self._answer, self._output, self._words):
            text.flush()
        if self._timer is not None:
            self._timer.cancel()
        if self._flushing is not None:
            await asyncio.wait([self._flushing])

    def _add(
        self,
        kind: EventType,
        *,
        call_id: str | None = None,
        data: dict[str, Any],
        values: Mapping[str, bytes] = {},
    ) -> None:
        if call_id is not None and (kind, call_id) in self._recorded:
            return
        event = NewEvent(
            type=kind,
            turn_id=self._round.turn_id,
            round_id=self._round.id,
            call_id=call_id,
            data=data,
            created_at=shared_time(),
        )
        self._waiting.append(_Waiting(event, values, self._redact))
        if self._timer is None and not self._is_closed:
            self._schedule(max(FLUSH_SECONDS, self._next_at - time.monotonic()))

    def _schedule(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._begin_flush)

    def _begin_flush(self) -> None:
        self._flushing = asyncio.create_task(self._flush(), name="nekro-round-events")

    async def _flush(self) -> None:
        pause = _PAUSE_SECONDS
        try:
            async with self.held():
                if self._waiting:
                    await self._write()
        except FencedError:  # another worker has the chat; this attempt is over
            self._waiting.clear()
        except StorageError as exc:  # the next batch, or the round's end, has these events too
            logger.bind(error=str(exc), events=len(self._waiting)).warning("round_events_not_written")
            pause = RETRY_SECONDS
        finally:
            self._timer, self._next_at = None, time.monotonic() + pause
            if self._waiting and not self._is_closed:
                self._schedule(pause)

    async def _write(self) -> None:
        async with self._database.begin() as transaction:
            await transaction.chats.hold(self._round.chat_key, fence=self._fence)
            await self.take(transaction)

    async def _missing(self, transaction: Transaction, events: list[NewEvent]) -> list[NewEvent]:
        """Return the events that the commit in doubt has not written."""
        kept = await transaction.events.of_turn(self._round.turn_id)
        known = {(event.type, event.call_id, event.created_at) for event in kept}
        return [event for event in events if (event.type, event.call_id, event.created_at) not in known]

    def _publish_live(self, kind: EventType, data: dict[str, Any]) -> None:
        event = live_event(kind, data, turn_id=self._round.turn_id, round_id=self._round.id)
        self._publisher.live(self._round.chat_key, event)


def _state_of(call: CallRecord) -> str:
    if call.is_detached:
        return "running"
    if call.approval_id is not None or call.is_waiting:
        return "awaiting"
    if call.error is None:
        return "done"
    return "cancelled" if call.error.startswith("cancelled:") else "failed"


def _kept(name: str, text: bytes, redact: Callable[[str], str]) -> dict[str, Any]:
    """Return tagged text as JSON data; of a long one, and of one that is not JSON, the length."""
    if len(text) <= _MOST_BYTES:
        try:
            value = from_json(redact(text.decode()), allow_inf_nan=False)
        except (ValueError, RecursionError):
            pass
        else:
            return {name: value}
    return {f"{name}_bytes": len(text)}
