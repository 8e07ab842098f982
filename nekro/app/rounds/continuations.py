"""Continuations: the programs of a turn go on in a new chat, from one of their calls.

The new chat gets a turn with the same programs. Calls before the chosen one are answered as in the old chat,
and clocks and random numbers show the same; the model is not asked for what it has answered. The chosen call
and those after it are made, in the new chat. The programs of the turn before the chosen one run first, for
their variables and files, and are answered as a whole. If one of them ends in another way, those after it do
not run, and the model is asked.

The rounds of the new turn are requested with the recorded code, as rounds whose worker has died, and what
their programs repeat is a row of ``parked_programs``. The id of a call in the new chat follows from its old
one (``nekro.app.calls.journal.copied_id``), so nothing of the new turn can be taken for something of the old.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from nekro.app.calls.journal import copied_id
from nekro.app.rounds.recordings import recording_of
from nekro.app.rounds.replays import Recording
from nekro.sandbox.models import Raised, Returned, Stopped, StopType, StubResult
from nekro.wire.invocation import Envelope, new_id
from nekro.wire.seals import ProgramSecrets
from nekro_agent import errors
from nekro_agent.errors import ConflictError, NotFoundError
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import MessageKind
from nekro_agent.shared_clock import shared_time
from storage.engine import Database
from storage.repositories.messages import Message
from storage.repositories.parked_programs import CopiedProgram, ProgramOrigin
from storage.repositories.rounds import Round, RoundRequest
from storage.states import FINAL_ROUND_STATES, RoundState, TriggerKind
from storage.transaction import Transaction

__all__ = ["Continuation", "Continuations"]

Results = Callable[[str, Sequence[str]], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """What one program of the new turn repeats."""

    item: Round
    #: The program of the old chat, after those that it went on with itself, and the chat of the first one.
    origins: list[str]
    chat_key: str
    #: By the ids of the old chat.
    answers: Mapping[str, StubResult]
    types: Mapping[str, SandboxMethodType]
    effects: Mapping[str, str]
    readings: str

    @property
    def size(self) -> int:
        """Bytes that count against ``NEKRO_AGENT__JOURNAL_BYTES``."""
        values = sum(len(one.value) for one in self.answers.values() if isinstance(one, Returned))
        return values + len(self.readings)


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A turn that is about to go on in a new chat."""

    #: The message of a person that the turn goes back to.
    cause: Message
    #: What was said after it and before the chosen call, in order.
    said: list[Message]
    copies: list[_Copy] = field(repr=False)
    secrets: ProgramSecrets = field(repr=False)

    async def write(self, transaction: Transaction, first: Round) -> None:
        """Let the requested first round of the new turn, and further ones, run the programs."""
        previous, ids = first, dict[str, str]()
        for number, copy in enumerate(self.copies, start=1):
            item = first if number == 1 else await self._request(transaction, copy.item, previous, ids)
            key = self.secrets.ids(item.id)
            ids = {old: copied_id(old, key) for old in copy.answers}
            answers = {ids[old]: _stored(ids[old], copy.types[old], one) for old, one in copy.answers.items()}
            effects = {ids[old]: method for old, method in copy.effects.items()}
            copied = CopiedProgram(
                round_id=item.id,
                chat_key=item.chat_key,
                origin=ProgramOrigin(
                    origins=copy.origins,
                    chat_key=copy.chat_key,
                    effects=effects,
                    stop_type=None if number == len(self.copies) else copy.item.stop_type,
                ),
                answers=answers,
                notes={"copy": f"0:{copy.readings},"} if copy.readings else {},
                answer=copy.item.answer,
                code=copy.item.code or "",
                model=copy.item.model,
            )
            await transaction.parked_programs.copy(copied)
            previous = item

    @staticmethod
    async def _request(
        transaction: Transaction, old: Round, previous: Round, ids: Mapping[str, str]
    ) -> Round:
        """Request the round that follows another one of the new turn."""
        is_by_call = old.trigger_kind is TriggerKind.CALL
        requested, _ = await transaction.rounds.request(
            RoundRequest(
                chat_key=previous.chat_key,
                trigger_kind=old.trigger_kind,
                trigger_id=ids.get(old.trigger_id, new_id()) if is_by_call else previous.id,
                turn_id=previous.turn_id,
                number=previous.number + 1,
                user_id=previous.user_id,
                observation=old.observation,
                segments=old.segments,
            )
        )
        return requested


class Continuations:
    """Prepares continuations; one instance per process."""

    def __init__(
        self, database: Database, secrets: ProgramSecrets, results: Results, *, journal_bytes: int
    ) -> None:
        """Create it.

        Args:
            results: ``MethodCaller.results``.
            journal_bytes: most bytes of answers that a program may repeat.
        """
        self._database = database
        self._secrets = secrets
        self._results = results
        self._journal_bytes = journal_bytes

    async def prepare(self, turn_id: str, call_id: str) -> Continuation:
        """Collect what the programs of a turn repeat, up to one of their calls.

        Raises:
            NotFoundError: the turn has no such call.
            ConflictError: its round still runs, or its program cannot be run again: it was not run or has
                read too much, an answer was not kept, or no person's message caused the turn.
            BrokerUnavailableError, StorageUnavailableError: a server does not answer.
        """
        async with self._database.read() as transaction:
            rounds, firsts = await _programs(transaction, await _round_of(transaction, turn_id, call_id))
            cause = await _cause(transaction, firsts[0])
            chosen = next(one for one in rounds[-1].calls or () if one["id"] == call_id)
            begin = datetime.fromisoformat(chosen["requested_at"])
            said = [
                message
                for first in firsts
                for message in await transaction.messages.of_turn(first.turn_id)
                if message.sequence > cause.sequence and message.created_at < begin
            ]
        copies = [await self._copy(item, None) for item in rounds[:-1]]
        copies.append(await self._copy(rounds[-1], chosen))
        if sum(copy.size for copy in copies) > self._journal_bytes:
            raise ConflictError(
                f"the answers before call {call_id} have more than {self._journal_bytes} bytes"
                " (NEKRO_AGENT__JOURNAL_BYTES)"
            )
        return Continuation(cause=cause, said=said, copies=copies, secrets=self._secrets)

    async def _copy(self, item: Round, chosen: Mapping[str, Any] | None) -> _Copy:
        """Collect what a program repeats.

        Args:
            chosen: its first call that it makes; None: it makes none.
        """
        program_id = item.program_id or item.id
        calls = [one for one in item.calls or () if not _was_cut(one)]
        if chosen is not None:
            begin = datetime.fromisoformat(chosen["requested_at"])
            calls = [one for one in calls if datetime.fromisoformat(one["requested_at"]) < begin]
        results = await self._results(item.chat_key, [one["id"] for one in calls])
        async with self._database.read() as transaction:
            rows = await transaction.calls.of_program(program_id)
            origin = await transaction.parked_programs.origin(program_id)
            turns = {item.turn_id, (await transaction.rounds.get(program_id)).turn_id}
            events = [event for turn in turns for event in await transaction.events.of_turn(turn)]
            recording = await recording_of(transaction, item, events, self._secrets, results=results)
        answers = {one["id"]: _answer(recording, one["id"]) for one in calls}
        with_effects = {row.id for row in rows} | (origin.effects if origin is not None else {}).keys()
        readings = item.readings or ""
        return _Copy(
            item=item,
            origins=[*(() if origin is None else origin.origins), program_id],
            chat_key=item.chat_key if origin is None else origin.chat_key,
            answers=answers,
            types={one["id"]: SandboxMethodType(one["type"]) for one in calls},
            effects={one["id"]: one["method"] for one in calls if one["id"] in with_effects},
            readings=readings if chosen is None else readings[: chosen.get("read")].rstrip(","),
        )


async def _round_of(transaction: Transaction, turn_id: str, call_id: str) -> Round:
    """Return the round of a turn that made a call, as its last attempt has recorded it."""
    rounds = [item for item in await transaction.rounds.rounds_of_turns(turn_id) if item.turn_id == turn_id]
    for item in rounds:
        if any(one["id"] == call_id for one in item.calls or ()):
            return item
    if any(item.state not in FINAL_ROUND_STATES for item in rounds):
        raise ConflictError(f"turn {turn_id} still runs; its calls can be chosen when their round has ended")
    raise NotFoundError(f"turn {turn_id} has no call {call_id}")


async def _programs(transaction: Transaction, item: Round) -> tuple[list[Round], list[Round]]:
    """Return the rounds whose programs led to that of a round, and it; and the first rounds of their turns.

    A program that has waited is one of them: the last round that went on with it.
    """
    found: list[Round] = []
    firsts: list[Round] = []
    first = item
    while True:
        rounds = [
            one
            for one in await transaction.rounds.rounds_of_turns(first.turn_id)
            if one.turn_id == first.turn_id
            and one.state is not RoundState.MERGED
            and one.sequence <= first.sequence
        ]
        found = [*rounds[: len(rounds) - bool(found)], *found]
        firsts.insert(0, rounds[0])
        if rounds[0].program_id is None:
            break
        first = await transaction.rounds.get(rounds[0].program_id)
    for number, one in enumerate(found):
        _refuse(one, is_first=number == 0)
    return found, firsts


def _refuse(item: Round, *, is_first: bool) -> None:
    """Raise ConflictError unless a program can be run again."""
    reason = item.not_resumable
    if not item.code or reason is None:
        reason = "it has no program that can be run again"
    elif not reason and item.state is not RoundState.DONE and item.calls is None:
        reason = "its calls were not recorded"
    elif not reason and not is_first and item.trigger_kind not in (TriggerKind.ROUND, TriggerKind.CALL):
        reason = "something else than its turn caused it"
    if reason:
        raise ConflictError(f"round {item.number} of turn {item.turn_id} cannot be run again: {reason}")


async def _cause(transaction: Transaction, first: Round) -> Message:
    is_by_message = first.trigger_kind is TriggerKind.MESSAGE
    cause = await transaction.messages.find(first.trigger_id) if is_by_message else None
    if cause is None or cause.kind is not MessageKind.USER or cause.chat_key != first.chat_key:
        raise ConflictError(
            "only a turn that a person's message caused can go on elsewhere, while it is kept"
        )
    return cause


def _was_cut(call: Mapping[str, Any]) -> bool:
    """Whether a call ended because its run did."""
    return str(call.get("error") or "").startswith("cancelled: ")


def _answer(recording: Recording, call_id: str) -> StubResult:
    call = recording.calls[call_id]
    if call.answer is None:
        raise ConflictError(
            f"the answer of call {call_id} of {call.path} was not kept: after a while, only those of"
            " at most 4,000 bytes are"
        )
    if isinstance(call.answer, Stopped) and call.answer.stop in (StopType.APPROVAL, StopType.WAITING):
        raise ConflictError(f"call {call_id} of {call.path} still waits, or was not made")
    return call.answer


def _stored(call_id: str, kind: SandboxMethodType, answer: StubResult) -> dict[str, Any]:
    """Return an answer as a worker stores it (``nekro.broker.calls.envelope_of``)."""
    if isinstance(answer, Raised):
        # The names of other errors are taken for those of plugins.
        error = {
            "exc_type": answer.error_type,
            "exc_module": errors.__name__,
            "exc_message": [answer.message],
        }
        return {"task_id": call_id, "status": "FAILURE", "result": error}
    now = shared_time()
    value = answer.value if isinstance(answer, Returned) else None
    envelope = Envelope.of(value=value, call_id=call_id, type=kind, started_at=now, finished_at=now)
    return {"task_id": call_id, "status": "SUCCESS", "result": envelope.model_dump(mode="json")}
