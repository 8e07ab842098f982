"""The warm pool: sandboxes that are started before their code exists.

One per chat, started during the LLM request; each serves one run. Their number and age are
bounded, as a waiting sandbox costs a few megabytes and a process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from loguru import logger

from nekro.sandbox.driver import Sandbox

__all__ = ["WarmPool"]


@dataclass(kw_only=True)
class _Entry:
    starting: asyncio.Task[Sandbox]
    expiry: asyncio.TimerHandle


class WarmPool:
    """Keeps started sandboxes by key until they are taken or too old."""

    def __init__(self, *, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._entries: dict[Hashable, _Entry] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def prepare(self, key: Hashable, start: Callable[[], Awaitable[Sandbox]]) -> None:
        """Start a sandbox for ``key`` in the background, unless there is one or the pool is full."""
        if key in self._entries or len(self._entries) >= self._most or self._seconds <= 0:
            return

        async def starting() -> Sandbox:
            return await start()

        expiry = asyncio.get_running_loop().call_later(self._seconds, self._expire, key)
        self._entries[key] = _Entry(starting=asyncio.create_task(starting()), expiry=expiry)

    async def ready(self, key: Hashable) -> None:
        """Wait until the sandbox for ``key`` has started or failed; returns at once without one."""
        entry = self._entries.get(key)
        if entry is not None:
            await asyncio.wait([entry.starting])

    async def take(self, key: Hashable) -> Sandbox | None:
        """Return the sandbox for ``key``, waiting for its start; None when there is none that runs.

        The error of a failed start is dropped: the caller starts a sandbox and gets the error again.
        """
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        entry.expiry.cancel()
        try:
            sandbox = await asyncio.shield(entry.starting)
        except Exception:
            # The run starts its own sandbox and gets the same error.
            return None
        except asyncio.CancelledError:
            self._retire(entry)
            raise
        if not sandbox.alive:
            await sandbox.close()
            return None
        return sandbox

    async def close(self) -> None:
        """Close every waiting sandbox."""
        for key in list(self._entries):
            self._expire(key)
        while self._retiring:
            await asyncio.wait(self._retiring)

    def _expire(self, key: Hashable) -> None:
        entry = self._entries.pop(key)
        entry.expiry.cancel()
        self._retire(entry)

    def _retire(self, entry: _Entry) -> None:
        task = asyncio.create_task(_close_when_started(entry.starting))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


async def _close_when_started(starting: asyncio.Task[Sandbox]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        try:
            sandbox = await starting
        except Exception as exc:
            # Only a warning: the run reports the error when it starts its own sandbox.
            logger.bind(error=str(exc)).warning("sandbox_prepare_failed")
            return
        await sandbox.close()
