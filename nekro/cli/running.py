"""How a command's process runs and ends: logs, cancellation by Ctrl-C and SIGTERM, exit codes.

`nekro exec` is the exception among exit codes: its own is the stop type of the run (0, 1, 2, 8, 9, 10, 11 or
14). Of those, 1 and 2 are also codes below, so `exec` reports these two under other numbers:
an internal error as 70 and a wrong command line or setting as 64 (the numbers of ``sysexits.h``).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nekro_agent.errors import (
    BrokerError,
    LLMError,
    NekroError,
    PluginError,
    PluginLoadError,
    SandboxError,
    ServiceError,
    SettingsError,
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "EXEC_CODES",
    "ExitCode",
    "TerminatedError",
    "configure_logs",
    "exit_code_of",
    "run_async",
]


T = TypeVar("T")


class TerminatedError(BaseException):
    """SIGTERM ended the command; a ``BaseException``, so that no ``except Exception`` swallows it."""


def run_async(
    main: Coroutine[Any, Any, T], *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T:
    """Run ``main`` to its end.

    Args:
        loop_factory: makes the event loop; None means asyncio's own.

    Raises:
        KeyboardInterrupt: Ctrl-C; ``main`` was cancelled and has cleaned up.
        TerminatedError: the same for SIGTERM.
    """
    # Imported here: modules that only name ``TerminatedError`` need no event loop.
    import asyncio

    terminated = False

    async def body() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            if task is not None:
                task.cancel()

        loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await main
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(body())
    except asyncio.CancelledError:
        if terminated:
            raise TerminatedError() from None
        raise


class ExitCode(IntEnum):
    """Exit codes of every command but `nekro exec`; ``meaning`` documents each member."""

    OK = 0, "Done."
    FAILED = 1, "A check of `doctor` or `demo` failed, or an internal error (run again with `--debug`)."
    USAGE = 2, "The command line or a setting is wrong."
    BROKER = 3, "The broker or the result backend does not answer, or it refused a message."
    STORAGE = 4, "The database does not answer, is not migrated, or lacks what was asked for."
    PLUGIN = 5, "A plugin failed to load."
    METHOD = 6, "A method is unknown, disabled, refused its arguments, failed or took too long; a job failed."
    SANDBOX = 7, "No sandbox can be started on this machine."
    LLM = 12, "No language model is configured, or the awaited turn failed or was cancelled."
    SERVICE = 13, "A process of the system did not start, ended early, or conflicts with a running one."
    INTERRUPTED = 130, "Ended by Ctrl-C."
    BROKEN_PIPE = 141, "The reader of the output closed the pipe."
    TERMINATED = 143, "Ended by SIGTERM."

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """Store the sentence of a member as its ``meaning``."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


#: What `nekro exec` returns instead, because the code on the left is a stop type.
EXEC_CODES: Final = {ExitCode.FAILED: 70, ExitCode.USAGE: 64}

#: The first match wins, so subclasses come before their parents.
_BY_ERROR: Final[tuple[tuple[type[BaseException], ExitCode], ...]] = (
    (SettingsError, ExitCode.USAGE),
    (UsageError, ExitCode.USAGE),
    (PluginLoadError, ExitCode.PLUGIN),
    (PluginError, ExitCode.METHOD),
    (BrokerError, ExitCode.BROKER),
    (StorageError, ExitCode.STORAGE),
    (SandboxError, ExitCode.SANDBOX),
    (LLMError, ExitCode.LLM),
    (ServiceError, ExitCode.SERVICE),
    (NekroError, ExitCode.FAILED),
    (TerminatedError, ExitCode.TERMINATED),
    (BrokenPipeError, ExitCode.BROKEN_PIPE),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code for any error; 1 when the error has no code of its own."""
    for kind, code in _BY_ERROR:
        if isinstance(error, kind):
            return code
    return ExitCode.FAILED


#: Loggers whose warnings about plugins only `nekro plugins` prints.
_QUIET: Final = frozenset({"loader", "registry"})


def configure_logs(*, debug: bool) -> None:
    """Send the logs of this package and of the standard library to stderr."""
    from nekro_agent.core.logger import StandardLogs, configure

    level = "DEBUG" if debug else "WARNING"
    configure(level=level, quiet=() if debug else _QUIET)
    # The drivers log every statement at DEBUG.
    logging.basicConfig(level="INFO" if debug else level, handlers=[StandardLogs()])
