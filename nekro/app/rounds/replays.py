"""Replays: recorded programs run again with their recorded answers, without a worker and without effect.

A program is run in a sandbox of this process, with an empty directory for its files. Its calls have the ids
that they had (``nekro.app.calls.journal``), so each is answered by the recording. A call that was not made
before, and one whose answer was not kept, is a difference and raises in the code. Recordings come from the
rows and events of a turn (``nekro.app.rounds.recordings``) or from a file (``nekro.app.rounds.cases``).
"""

from __future__ import annotations

import asyncio
import difflib
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker_config.settings import SandboxSettings
from nekro.sandbox.models import (
    KeptVariables,
    Raised,
    RunRequest,
    RunResult,
    StopType,
    StubCall,
    StubMethod,
    StubResult,
)
from nekro.wire.invocation import new_id
from nekro_agent.methods import SandboxMethodType
from storage.files.areas import DataAreas

if TYPE_CHECKING:
    from nekro.sandbox.manager import SandboxManager

__all__ = [
    "Difference",
    "MadeCall",
    "NextId",
    "ProgramReplay",
    "RecordedCall",
    "Recording",
    "Replayer",
    "name_of",
    "open_replayer",
    "stubs_of",
    "text_difference",
]

_NOT_RECORDED: Final = "NotRecordedError"
_NOT_MADE: Final = "it did not make this call before"
_NOT_KEPT: Final = "its answer was not kept: events have at most 4,000 bytes of one"
#: Characters of the arguments of a call, and lines of a difference of texts.
_MOST_CHARS: Final = 200
_MOST_LINES: Final = 20


#: Returns the id of the next call of a method with these arguments, in one run of a program.
NextId = Callable[[str, bytes], str]


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """A call that a program made; ``answer`` is None if it was not kept."""

    path: str
    #: Short name in the code that made it: the function's, or its alias; None: it has none.
    called_as: str | None
    type: SandboxMethodType
    answer: StubResult | None

    @property
    def name(self) -> str:
        """The function's name."""
        return name_of(self.path)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A program and what is recorded of its run."""

    #: None: of a file.
    round_id: str | None = None
    #: That of its round in the turn.
    number: int
    chat_key: str
    code: str
    #: As in ``RunRequest``.
    seed: str
    readings: str
    #: Begins a run: returns what names its calls.
    new_ids: Callable[[], NextId]
    #: By the ids of such a run.
    calls: Mapping[str, RecordedCall]
    #: None: its end is not recorded.
    stop_type: StopType | None
    output: str | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a replay differs from what is recorded.

    ``kind`` is call, answer, missing, end or output, and of another model's answer also code or words.
    """

    kind: str
    text: str
    #: The line of the code; None: of no line.
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class MadeCall:
    """A call that a replay made; ``recorded`` is None if it was not made before."""

    id: str
    path: str
    arguments: bytes
    line: int | None
    recorded: RecordedCall | None


@dataclass(frozen=True, kw_only=True)
class ProgramReplay:
    """How one program ran again."""

    round_id: str | None
    number: int
    code: str
    stop_type: StopType
    output: str
    #: Calls that it made, and how many of them were answered as before.
    calls: int
    answered: int
    made: Sequence[MadeCall] = ()
    seconds: float
    differences: list[Difference] = field(default_factory=list)
    #: What it left for the next program.
    variables: KeptVariables = field(default_factory=KeptVariables, repr=False)


class Replayer:
    """Runs recorded programs; ``sandboxes`` must have areas of their own."""

    def __init__(self, sandboxes: SandboxManager, *, keep_bytes: int) -> None:
        """Create it.

        Args:
            keep_bytes: as in ``RunRequest``.
        """
        self._sandboxes = sandboxes
        self._keep_bytes = keep_bytes

    async def replay(self, recordings: Sequence[Recording]) -> list[ProgramReplay]:
        """Run programs of a turn in order; each begins with the variables of the one before.

        Raises:
            SandboxError: a program could not be run.
        """
        replays, variables = [], KeptVariables()
        for recording in recordings:
            replay = await self.run(recording, variables)
            variables = replay.variables
            replays.append(replay)
        return replays

    async def run(
        self, recording: Recording, variables: KeptVariables, *, methods: Sequence[StubMethod] | None = None
    ) -> ProgramReplay:
        """Run one program that begins with these variables.

        Args:
            methods: what it may call; None: what is recorded of it.

        Raises:
            SandboxError: it could not be run.
        """
        answers = _Answers(recording, stubs_of(recording) if methods is None else methods)
        next_id = recording.new_ids()
        request = RunRequest(
            run_id=new_id(),
            chat_key=recording.chat_key,
            container_key=f"replay-{new_id()}",
            code=recording.code,
            methods=list(answers.methods.values()),
            dispatch=answers.answer,
            call_id=lambda token, arguments, readings: next_id(answers.path_of(token), arguments),
            seed=recording.seed,
            readings=recording.readings,
            keep_bytes=self._keep_bytes,
            variables=variables.values,
        )
        result = await self._sandboxes.run(request)
        return ProgramReplay(
            round_id=recording.round_id,
            number=recording.number,
            code=recording.code,
            stop_type=result.stop_type,
            output=result.output,
            calls=result.calls,
            answered=sum(_answer_of(made.recorded) is not None for made in answers.made),
            made=answers.made,
            seconds=result.duration_seconds,
            differences=[*answers.differences, *answers.missing(), *_ends(recording, result)],
            variables=result.kept or KeptVariables(),
        )


def name_of(path: str) -> str:
    """Return the name of the function of a method's full name."""
    return path.rpartition(".")[2]


@asynccontextmanager
async def open_replayer(
    settings: SandboxSettings, *, directory: Path, packages_dir: Path, hash_seed: int
) -> AsyncIterator[Replayer]:
    """Return what replays programs, for a block.

    Args:
        directory: for their files; removed at the end.
        packages_dir, hash_seed: as in ``SandboxManager``.

    Raises:
        SandboxUnavailableError: this host has no isolation that satisfies the settings.
    """
    from nekro.sandbox.manager import SandboxManager  # recordings are read without it

    areas = DataAreas(directory)
    manager = SandboxManager(settings, areas, packages_dir=packages_dir, hash_seed=hash_seed)
    try:
        await manager.start()
        yield Replayer(manager, keep_bytes=settings.keep_variables_bytes if settings.keep_variables else 0)
    finally:
        await manager.close()
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def text_difference(kind: str, before: str, now: str) -> list[Difference]:
    """Compare two texts by line; nothing if they are equal."""
    if before == now:
        return []
    lines = [*difflib.unified_diff(before.split("\n"), now.split("\n"), lineterm="", n=1)][2:]
    more = [f"… {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
    return [Difference(kind=kind, text="\n".join([*lines[:_MOST_LINES], *more]))]


class _Answers:
    """Answers the calls of one run as the recording does."""

    def __init__(self, recording: Recording, methods: Sequence[StubMethod]) -> None:
        self._calls = recording.calls
        self.methods = {method.token: method for method in methods}
        self.made: list[MadeCall] = []
        self.differences: list[Difference] = []

    def path_of(self, token: str) -> str:
        """Return the full name of a method; "" if the token is none of its."""
        method = self.methods.get(token)
        return "" if method is None else method.path

    async def answer(self, call: StubCall) -> StubResult:
        """Answer a call as it was answered before."""
        path, recorded = self.path_of(call.token), self._calls.get(call.call_id)
        made = MadeCall(
            id=call.call_id, path=path, arguments=call.arguments, line=call.line, recorded=recorded
        )
        self.made.append(made)
        if (answer := _answer_of(recorded)) is not None:
            return answer
        kind, why = ("call", _NOT_MADE) if recorded is None else ("answer", _NOT_KEPT)
        arguments = call.arguments.decode(errors="replace")[:_MOST_CHARS]
        self.differences.append(Difference(kind=kind, text=f"{path} {arguments}: {why}", line=call.line))
        return Raised(error_type=_NOT_RECORDED, message=f"{path}: {why}")

    def missing(self) -> list[Difference]:
        """Return the recorded calls that were not made."""
        made = {call.id for call in self.made}
        return [
            Difference(kind="missing", text=f"{call.path}: it did not make this call again")
            for call_id, call in self._calls.items()
            if call_id not in made
        ]


def _answer_of(recorded: RecordedCall | None) -> StubResult | None:
    return None if recorded is None else recorded.answer


def stubs_of(recording: Recording) -> list[StubMethod]:
    """Return the methods that the recording names; of two with the same name, code finds the first."""
    methods: dict[tuple[str, str | None], StubMethod] = {}
    for number, call in enumerate(recording.calls.values()):
        if (call.path, call.called_as) not in methods:
            is_taken = any(one.name == call.called_as for one in methods.values())
            methods[call.path, call.called_as] = StubMethod(
                token=f"method_{number}",
                name=None if is_taken else call.called_as,
                path=call.path,
                signature="(*args, **kwargs)",
                doc=None,
                type=call.type,
                timeout_seconds=None,
            )
    return list(methods.values())


def _ends(recording: Recording, result: RunResult) -> list[Difference]:
    """Compare how a program ended, and what it printed."""
    found = []
    before = recording.stop_type
    if before is not None and before != result.stop_type:
        text = f"it ended as {result.stop_type.name}, and before as {before.name}"
        found.append(Difference(kind="end", text=text))
    if recording.output is not None:
        found += text_difference("output", recording.output, result.output)
    return found
