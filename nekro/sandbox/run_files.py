"""The files of a run where hosts share no disk: brought before it, and committed at its end.

Methods may run on other hosts. Before a call is sent, what the program has changed is committed, so the
method reads it; before the program gets the answer, what the method has changed is brought, so the next line
reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from loguru import logger

from nekro.sandbox.models import (
    STOPPED_BY_CALL,
    Dispatch,
    Limit,
    Raised,
    RunResult,
    Stopped,
    StopType,
    StubCall,
    StubResult,
)
from nekro.sandbox.shared import LINK_NAMES
from nekro_agent.errors import (
    DamagedFileError,
    FencedError,
    FilesQuotaError,
    InvalidValueError,
    NekroError,
)
from nekro_agent.ports import FileAreas

__all__ = ["RunAreas", "RunFiles", "UsedAreas"]

#: Names that a message lists.
_MOST_NAMES: Final = 5


class UsedAreas(Protocol):
    """The uploads of a chat and the shared files of its sandbox, while a run uses them."""

    async def pull(self) -> None:
        """Bring what others have committed to both.

        Raises:
            NekroError: files could not be brought.
        """
        ...

    async def push(self) -> Mapping[str, str]:
        """Commit what has changed in the shared files; returns reasons by path of what cannot be kept.

        Raises:
            NekroError: nothing was committed.
        """
        ...


class RunAreas(Protocol):
    """The directories of runs."""

    @property
    def on_host(self) -> FileAreas:
        """The directories of this host, as they are."""
        ...

    def for_run(
        self, chat_key: str, container_key: str, *, fence: int | None
    ) -> AbstractAsyncContextManager[UsedAreas | None]:
        """Keep both areas in use for a block, up to date at its begin; None: all hosts see the same files."""
        ...


class RunFiles:
    """Exchanges the files of one run; does nothing where all hosts see the same files."""

    def __init__(self, used: UsedAreas | None) -> None:
        self._used = used

    @property
    def are_exchanged(self) -> bool:
        """Whether the run's end must wait for the sandbox's, so that its files are committed."""
        return self._used is not None

    def around(self, dispatch: Dispatch) -> Dispatch:
        """Return a dispatch that exchanges files before and after each call."""
        used = self._used
        if used is None:
            return dispatch

        async def answer(call: StubCall) -> StubResult:
            try:
                left_out = _named(await used.push())
            except NekroError as exc:
                return _raised(exc, "the call was not made, as the files in /app/shared could not be kept")
            result = await dispatch(call)
            if isinstance(result, Stopped):  # the program reads nothing any more
                return result
            if isinstance(result, Raised) and left_out:  # perhaps because the method lacks a file
                words = f"{result.message} [methods do not see in /app/shared: {left_out}]"
                result = dataclasses.replace(result, message=words)
            try:
                await used.pull()
            except NekroError as exc:
                return _raised(exc, "the method has run, but its files could not be brought")
            return result

        return answer

    async def committed(self, result: RunResult) -> RunResult:
        """Commit what the run has left, after its sandbox has ended; a failure becomes its error."""
        if self._used is None:
            return result
        try:
            left_out = _named(await self._used.push())
        except NekroError as exc:
            return _failed(result, exc)
        return _noted(result, f"not kept in /app/shared: {left_out}") if left_out else result


#: The links that programs get, as paths of ``LocalArea.push``.
_LINKS: Final = frozenset(map(ascii, LINK_NAMES))


def _named(left_out: Mapping[str, str]) -> str:
    """Return a text that names paths with reasons; "" if there are none."""
    names = [f"{path}: {reason}" for path, reason in left_out.items() if path not in _LINKS]
    more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return "; ".join([*names[:_MOST_NAMES], *more])


def _raised(exc: NekroError, what: str) -> Raised:
    logger.bind(error=str(exc), error_type=type(exc).__name__).warning("run_files_not_exchanged")
    return Raised(error_type=type(exc).__name__, message=f"{what}: {_words(exc)}")


def _failed(result: RunResult, exc: NekroError) -> RunResult:
    logger.bind(error=str(exc), error_type=type(exc).__name__).warning("run_files_not_committed")
    words = f"the files in /app/shared were not kept: {_words(exc)}"
    # The rest of such a run depends on the type, so a failure only adds a line to the output.
    if result.stop_type in STOPPED_BY_CALL:
        return _noted(result, words)
    if result.error is not None:
        return dataclasses.replace(result, error=f"{result.error}; {words}")
    limit = result.limit or (Limit.DISK if isinstance(exc, FilesQuotaError) else None)
    stop = StopType.ERROR if result.stop_type is StopType.NORMAL else result.stop_type
    return dataclasses.replace(result, stop_type=stop, limit=limit, error=words)


def _words(exc: NekroError) -> str:
    """Describe an error to code and the model, which must not learn the store's address."""
    if isinstance(exc, DamagedFileError | FencedError | FilesQuotaError | InvalidValueError):
        return str(exc)
    return "the store of files or the database does not answer; try again later"


def _noted(result: RunResult, words: str) -> RunResult:
    separator = "" if result.output.endswith("\n") or not result.output else "\n"
    return dataclasses.replace(result, output=f"{result.output}{separator}[{words}]\n")
