"""The input and output types of a run.

A ``RunRequest`` has the code, the chat and the methods that this run may call; the manager
passes each call to ``RunRequest.dispatch`` and returns a ``RunResult``. No field of a result is
parsed from the output of the code.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum, StrEnum
from typing import Final

from nekro.wire.invocation import new_id
from nekro_agent.methods import SandboxMethodType

__all__ = [
    "ARGUMENT_ERROR",
    "GONE_SECONDS",
    "HOST_TOKEN_PREFIX",
    "MOST_READINGS_BYTES",
    "NOT_RESUMABLE",
    "READINGS_BYTES",
    "STOPS",
    "Dispatch",
    "KeptVariables",
    "Limit",
    "Raised",
    "Returned",
    "RunRequest",
    "RunResult",
    "StopType",
    "Stopped",
    "StubCall",
    "StubMethod",
    "StubResult",
    "random_call_id",
]

#: The ``Raised.error_type`` that the code sees as a ``TypeError``: the arguments were wrong.
ARGUMENT_ERROR = "ArgumentError"
#: How long killed processes may take to be gone: a write to a slow disk delays the end of one by seconds.
GONE_SECONDS: Final = 10.0
#: Begins the tokens of what the host itself serves. A plugin's token is an identifier, so it differs.
HOST_TOKEN_PREFIX: Final = "host:"  # noqa: S105 - a name, not a secret

#: Most bytes of readings in one call, and in all calls of a program; a guest that reads more says
#: ``NOT_RESUMABLE``.
READINGS_BYTES: Final = 64 << 10
MOST_READINGS_BYTES: Final = 1 << 20
NOT_RESUMABLE: Final = "!"


class StopType(IntEnum):
    """Why a run ended; decided by the host. The numbers are those of the reference, which has none of those
    from 14."""

    #: The code ran to its end.
    NORMAL = 0
    #: The code raised, crashed or exceeded a limit (``RunResult.limit`` names it).
    ERROR = 1
    #: The run exceeded its wall time.
    TIMEOUT = 2
    #: An AGENT method answered; the lines after it did not run.
    AGENT = 8
    #: The code ended itself with ``exit(9)``, or an operator stopped it.
    MANUAL = 9
    #: The sandbox violated the protocol or the code was refused.
    SECURITY = 10
    #: A MULTIMODAL_AGENT method answered; the lines after it did not run.
    MULTIMODAL_AGENT = 11
    #: A call waits until a person approves it; the lines after it did not run.
    APPROVAL = 14
    #: A program that was run again after its worker died took another course than before.
    DIVERGED = 15
    #: The program waits for a job, a time or an answer, and goes on then.
    WAITING = 16


#: Stop types of runs that a result ended, by the type of the method.
STOPS: Mapping[SandboxMethodType, StopType] = {
    SandboxMethodType.AGENT: StopType.AGENT,
    SandboxMethodType.MULTIMODAL_AGENT: StopType.MULTIMODAL_AGENT,
}


#: Stop types of runs that end at a call.
STOPPED_BY_CALL: Final = (*STOPS.values(), StopType.APPROVAL, StopType.DIVERGED, StopType.WAITING)


class Limit(StrEnum):
    """The limit that ended a run."""

    #: Seconds from the start of the code, waiting for calls included.
    WALL = "wall"
    #: CPU seconds of one process.
    CPU = "cpu"
    #: Memory of all processes together, or address space of one.
    MEMORY = "memory"
    #: Processes and threads.
    PIDS = "pids"
    #: Bytes or files in ``/app/shared``, or a full ``/tmp``.
    DISK = "disk"
    #: Bytes of one file.
    FILE_SIZE = "file_size"
    #: Open descriptors of one process.
    OPEN_FILES = "open_files"
    #: Bytes printed.
    OUTPUT = "output"
    #: Seconds in which the sandbox did not read an answer.
    UNREAD = "unread"
    #: Refused calls: too many, of unknown methods, with too large arguments.
    CALLS = "calls"
    #: No limit was exceeded: a guard failed, stalled or could not read; ``error`` names it.
    GUARD = "guard"


@dataclass(frozen=True, kw_only=True)
class StubMethod:
    """A method as the code sees it: a function ``name``, also available at ``path``."""

    #: Name that the sandbox sends to call it: an identifier of at most 64 characters.
    token: str
    #: Bare function name; None when another plugin's method owns that name.
    name: str | None
    #: ``author.module.function``.
    path: str
    #: As written in a ``def``: ``(text: str, times: int = 1) -> str``.
    signature: str
    doc: str | None
    type: SandboxMethodType
    #: Longest wait for one call; None: its dispatch ends it at its own deadline.
    timeout_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class StubCall:
    """One call of a method, as received from the sandbox."""

    token: str
    #: Assigned by the host; the sandbox's own number is used by the bridge only.
    call_id: str
    #: Tagged text of the arguments. Hostile: only ``nekro.wire.values.decode_arguments`` may parse it.
    arguments: bytes
    #: The line of the code that makes it, from 1, as the sandbox says; None if it says none. Only shown.
    line: int | None = None
    #: What the program has read since its last call, such as clocks: its form is checked, and no host reads
    #: it. "" when it has read nothing; ``NOT_RESUMABLE`` when the program cannot be run again.
    readings: str = ""


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The method returned; ``value`` is tagged text, decoded inside the sandbox."""

    value: bytes


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The method, or its dispatch, failed.

    The code sees ``MethodError: <error_type>: <message>``, or a ``TypeError`` when
    ``error_type`` is ``ARGUMENT_ERROR``. Neither field may hold a host path or a secret.
    """

    error_type: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The call ends the run: its result does (AGENT types), or it waits for approval; the host keeps both."""

    stop: StopType


StubResult = Returned | Raised | Stopped
Dispatch = Callable[[StubCall], Awaitable[StubResult]]


@dataclass(frozen=True, kw_only=True)
class KeptVariables:
    """Top-level variables that one program leaves for the next one."""

    #: Tagged text of each variable by its name, checked by ``nekro.sandbox.variables``; only sandboxes build
    #: the values.
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Names of variables that were not kept: no plain value, too large, or a name of the system.
    not_kept: tuple[str, ...] = ()


def random_call_id(token: str, arguments: bytes, readings: str) -> str:
    """Return an id that no other attempt at the run makes; see ``RunRequest.call_id``."""
    return new_id()


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One piece of code to run.

    ``dispatch`` is awaited once per call, at most ``max_calls_in_flight`` at a time. It is cancelled
    when the call exceeds its time or the run ends, and then should revoke the call.
    """

    run_id: str
    chat_key: str
    container_key: str
    #: Fencing token of the chat's lease, which changes of files in a store require; None: there is no lease.
    fence: int | None = None
    code: str
    methods: Sequence[StubMethod]
    dispatch: Dispatch
    #: Returns the id of the next call, by its token, arguments and readings; called in the order of the
    #: calls, also for those that are not dispatched.
    call_id: Callable[[str, bytes, str], str] = field(default=random_call_id, repr=False)
    #: Whether a call with these arguments must not be made; such a call ends the run with SECURITY.
    is_forbidden: Callable[[bytes], bool] | None = field(default=None, repr=False)
    #: None means the setting ``sandbox.wall_seconds``.
    wall_seconds: float | None = None
    #: Most bytes of variables that the run may leave (``RunResult.kept``); 0: none are kept.
    keep_bytes: int = 0
    #: Tagged text of the variables that the code begins with, by name, from an earlier ``KeptVariables``.
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Called with each piece of cleaned output while the code runs; must not block.
    on_output: Callable[[str], None] | None = field(default=None, repr=False)
    #: The source of the program's random numbers, 64 hexadecimal digits: ``ProgramSecrets.seed``
    #: where the program may be run again.
    seed: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    #: All ``StubCall.readings`` of an earlier attempt in their order, joined by commas: this one reads the
    #: same values before it reads its own.
    readings: str = field(default="", repr=False)
    #: Id of a program that may be run again, the same in each attempt: what one changes in the shared files
    #: is undone before the next one (``nekro.sandbox.undo``). None: it is not run again.
    program_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    run_id: str
    stop_type: StopType
    #: As a shell reports it: the process's own exit code, or 128 + signal. None when a method's result
    #: ended the run (AGENT, MULTIMODAL_AGENT) and the result was returned before the process had ended.
    exit_code: int | None
    #: Cleaned text of stdout and stderr in order; the middle is left out when it is too long.
    output: str
    #: Whether a part of ``output`` is left out.
    truncated: bool
    #: Set when a limit ended the run.
    limit: Limit | None
    #: Calls that the code made, refused ones included.
    calls: int
    #: Last line of the traceback, or the fault that the host detected; display only.
    error: str | None
    started_at: datetime
    duration_seconds: float
    driver: str
    #: What it read after its last call, as ``StubCall.readings``.
    readings: str = ""
    #: The variables at its end; None if none are to be kept, or if the run was killed.
    kept: KeptVariables | None = None
