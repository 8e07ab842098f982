"""The exit codes of the `nekro` commands.

`nekro exec` is the exception: its exit code is the stop type of the run (0, 1, 2, 8, 9, 10, 11 or 14).
Of those, 1 and 2 are also codes below, so `exec` reports these two under other numbers:
an internal error as 70 and a wrong command line or setting as 64 (the numbers of ``sysexits.h``).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from nekro.cli.running import TerminatedError
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

__all__ = ["EXEC_CODES", "ExitCode", "exit_code_of"]


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
