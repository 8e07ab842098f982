"""Run a command's coroutine: Ctrl-C and SIGTERM cancel it, so that its services are stopped in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

__all__ = ["TerminatedError", "run_async"]

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
