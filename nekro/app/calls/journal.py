"""The journal of a program: what it has called and read, so that it can be run again.

When the worker of a program dies, the next holder of its chat's lease runs the same code again from its first
line. The program then makes the same calls: the id of each follows from the program, the method, the
arguments, and which one of equal calls it is, so threads may interleave in another order. A call that was
made is not made again. A recorded one is answered from its row; one without a row has a mark in the broker
and its result in Redis (``nekro.broker.program_calls``). What else a program reads, clocks, is noted with the
next call that is sent, and a repetition reads the same until the notes end. A note begins with the number of
characters that the program had read before: where one is lost, those after it are not used.

A program that makes another recorded call than it made before, while effects of it are left that it has not
asked for again, has taken another course: it is stopped, and its model reads what happened.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from nekro.sandbox.models import NOT_RESUMABLE
from nekro_agent.durations import FRESH_SECONDS, PROGRAM_SECONDS
from storage.states import CallState

if TYPE_CHECKING:
    from datetime import datetime

    from nekro.broker.program_calls import Marked
    from nekro.wire.seals import ProgramSecrets
    from storage.engine import Database
    from storage.repositories.calls import Call
    from storage.repositories.parked_programs import ParkedProgram, ProgramOrigin

__all__ = ["CallIds", "ProgramJournal", "ReadingNotes", "copied_id", "program_ids", "read_journal"]

#: States of calls without an effect: a person or a worker may refuse them, or no worker has begun them.
_WITHOUT_EFFECT: Final = (CallState.QUEUED, CallState.CANCELLED)


class CallIds:
    """Makes the ids of a program's calls."""

    def __init__(self, key: str, *copies: str, chats: tuple[str, str] | None = None) -> None:
        """Create it for one run of a program.

        Args:
            key: ``ProgramSecrets.ids``; who does not know it cannot foretell an id.
            copies: those of the programs that go on in other chats with the one of ``key``, one after the
                other; the last is the program itself.
            chats: the chats of the first and of the last of them: arguments name its own chat.
        """
        self._key = bytes.fromhex(key)
        self._copies = copies
        self._chats = () if chats is None else tuple(zip(*map(_quoted, chats), strict=True))
        #: How often each call was made.
        self._made: dict[bytes, int] = {}

    def next(self, method: str, arguments: bytes) -> str:
        """Return the id of the next call of a method with these arguments: 32 hexadecimal digits."""
        for old, new in self._chats:
            arguments = arguments.replace(new, old)
        digest = hashlib.blake2b(method.encode(), digest_size=16, key=self._key)
        digest.update(b"\0")
        digest.update(arguments)
        call = digest.digest()
        nth = self._made[call] = self._made.get(call, 0) + 1
        made = hashlib.blake2b(call + nth.to_bytes(8), digest_size=16, key=self._key).hexdigest()
        for key in self._copies:
            made = copied_id(made, key)
        return made


def _quoted(text: str) -> tuple[bytes, bytes]:
    """Return a string as JSON may have it."""
    return json.dumps(text).encode(), json.dumps(text, ensure_ascii=False).encode(errors="surrogatepass")


def program_ids(
    secrets: ProgramSecrets, origin: ProgramOrigin | None, run_id: str, chat_key: str
) -> tuple[CallIds, str]:
    """Return what makes the ids of a program's calls, and its seed.

    Args:
        origin: the program of another chat that it goes on with; None: there is none.
    """
    if origin is None:
        return CallIds(secrets.ids(run_id)), secrets.seed(run_id)
    programs = [*origin.origins, run_id]
    ids = CallIds(*map(secrets.ids, programs), chats=(origin.chat_key, chat_key))
    return ids, secrets.seed(programs[0])


def copied_id(call_id: str, key: str) -> str:
    """Return the id of a program's call in a program that goes on with it in another chat.

    Args:
        key: ``ProgramSecrets.ids`` of that program.
    """
    return hashlib.blake2b(call_id.encode(), digest_size=16, key=bytes.fromhex(key)).hexdigest()


class ReadingNotes:
    """What a program reads, and the notes of it that calls take to the journal."""

    def __init__(self, repeated: str = "") -> None:
        """Create it for one run of a program.

        Args:
            repeated: what it reads again, as ``ProgramJournal.read``.
        """
        self._begin = len(repeated)
        #: What it has read since; each piece ends with a comma.
        self._read = ""
        self._noted = 0
        #: Whether it cannot say what it has read.
        self.are_lost = False

    @property
    def text(self) -> str:
        """What it has read that it does not read again."""
        return self._read

    def __len__(self) -> int:
        return self._begin + len(self._read)

    def add(self, readings: str) -> None:
        """Add those of a call, ``StubCall.readings``, in the order of the calls."""
        if readings == NOT_RESUMABLE:
            self.are_lost = True
        elif readings:
            self._read += f"{readings},"

    def take(self) -> str:
        """Return the note of a call that is about to be sent: what no earlier one has taken."""
        if self._noted == len(self._read):
            return ""
        note = f"{self._begin + self._noted}:{self._read[self._noted :]}"
        self._noted = len(self._read)
        return note

    def put_back(self, note: str) -> None:
        """Let the next call take a note again, because the call that had it was not sent."""
        if note:
            self._noted = min(self._noted, int(note.partition(":")[0]) - self._begin)


class ProgramJournal:
    """What a program did in an earlier attempt; used on one event loop."""

    def __init__(
        self,
        rows: Iterable[Call],
        notes: Mapping[str, str],
        *,
        parked: Sequence[ParkedProgram] = (),
        origin: ProgramOrigin | None = None,
    ) -> None:
        """Create it.

        Args:
            rows: its recorded calls.
            notes: those of its calls, by call id.
            parked: its waits, and what it has of a program of another chat.
            origin: that program; None: there is none.
        """
        #: The program of another chat that it goes on with; None: there is none.
        self.origin = origin
        #: Methods of calls with effects that such a program has made, and those not asked for again.
        self.copied = {} if origin is None else origin.effects
        self._unread_copied = set(self.copied)
        #: Results of calls without rows, as workers stored them.
        self.answers: Mapping[str, Any] = ChainMap(*(one.answers for one in parked))
        #: Calls without rows whose results or notes an earlier wait has kept.
        self.kept = {call_id for one in parked for call_id in (*one.answers, *one.notes)}
        notes = dict(ChainMap(dict(notes), *(one.notes for one in parked)))
        self._rows = {row.id: row for row in rows}
        self._made = self._rows.keys() | notes.keys() | self.kept
        #: Whether all calls so far were made before.
        self.is_repeating = True
        self._unread = {row.id: row for row in self._rows.values() if row.state not in _WITHOUT_EFFECT}
        #: From the first of its recorded calls to the last, without the waits of the program.
        self._seconds = _seconds_of(self._rows.values())
        self._was_read = asyncio.Event()
        #: What it read, as pieces that end with a comma.
        self.read = _joined(notes.values())

    def has(self, call_id: str) -> bool:
        """Whether a call was made before."""
        return call_id in self._made

    def take(self, call_id: str) -> Call | None:
        """Return the row of a call that the program makes; None if there is none."""
        self.is_repeating = self.is_repeating and self.has(call_id)
        if self._unread.pop(call_id, None) is not None or call_id in self._unread_copied:
            self._unread_copied.discard(call_id)
            self._was_read.set()
        return self._rows.get(call_id)

    async def is_followed(self) -> bool:
        """Whether a recorded call that the journal does not have may be made: all effects were asked for.

        Waits as long as the earlier attempt took to make its calls, because other threads of the program may
        still be about to make them: answers come sooner now, so its threads run in another order.
        """
        try:
            async with asyncio.timeout(min(self._seconds, PROGRAM_SECONDS) + FRESH_SECONDS):
                while self.has_unread:
                    self._was_read.clear()
                    await self._was_read.wait()
        except TimeoutError:
            return False
        return True

    @property
    def readings(self) -> str:
        """What it read, as ``RunRequest.readings``."""
        return self.read.removesuffix(",")

    @property
    def rows(self) -> list[Call]:
        """The recorded calls, in order."""
        return list(self._rows.values())

    @property
    def has_unread(self) -> bool:
        """Whether there are calls with effects that the program has not asked for again."""
        return bool(self._unread or self._unread_copied)


async def read_journal(
    database: Database,
    marks_of: Callable[[str, str], Awaitable[Mapping[str, Marked]]],
    *,
    chat_key: str,
    program_id: str,
) -> ProgramJournal:
    """Read what a program did in earlier attempts.

    Args:
        marks_of: ``MethodCaller.marks``.
        program_id: that of its round.

    Raises:
        StorageUnavailableError, BrokerUnavailableError: a server does not answer; the program must not run.
    """
    async with database.read() as transaction:
        rows = await transaction.calls.of_program(program_id)
        parked = await transaction.parked_programs.of_program(program_id)
        origin = await transaction.parked_programs.origin(program_id)
    notes = {call_id: mark.note for call_id, mark in (await marks_of(chat_key, program_id)).items()}
    notes |= {row.id: row.readings for row in rows if row.readings}
    return ProgramJournal(rows, notes, parked=parked, origin=origin)


def _seconds_of(rows: Iterable[Call]) -> float:
    """Return how long programs made calls, each round by itself: between two it waited."""
    times: dict[str | None, list[datetime]] = {}
    for row in rows:
        times.setdefault(row.round_id, []).append(row.requested_at)
    return sum((max(found) - min(found)).total_seconds() for found in times.values())


def _joined(notes: Iterable[str]) -> str:
    """Return what was read, up to the first note that is missing."""
    pieces = (note.partition(":") for note in notes if note)
    joined = ""
    for begin, text in sorted((int(begin), text) for begin, _, text in pieces):
        if begin > len(joined):
            break
        joined += text[len(joined) - begin :]
    return joined
