"""Methods behind decorators, on classes, and made by a loop."""

import asyncio
import functools
import logging
import os
import time

from nekro_agent.api import *  # noqa: F403
from nekro_agent.api.plugin import *  # noqa: F403

log = logging.getLogger(__name__)
plugin = NekroPlugin(  # noqa: F405
    name="Decorated", module_name="decorated", description="", version="1", author="Ada", url=""
)
CALLS = []
LOCK = asyncio.Lock()


def timed(func):
    @functools.wraps(func)
    async def wrapper(*args, **kwargs):
        began = time.monotonic()
        try:
            return await func(*args, **kwargs)
        finally:
            CALLS.append((func.__name__, time.monotonic() - began))
            log.warning("%s ran %d times", func.__name__, len(CALLS))

    return wrapper


def retry(times):
    def decorate(func):
        @functools.wraps(func)
        async def again(_ctx, *args, **kwargs):
            for left in range(times, -1, -1):
                try:
                    return await func(_ctx, *args, **kwargs)
                except ConnectionError:
                    if not left:
                        raise
                    await asyncio.sleep(0)

        return again

    return decorate


def plain(func):
    @functools.wraps(func)
    def inner(*args, **kwargs):
        return func(*args, **kwargs)

    return inner


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "flaky")  # noqa: F405
@timed
@retry(times=2)
async def flaky(_ctx: schemas.AgentCtx, failures: int) -> str:  # noqa: F405
    """Fails some times before it works."""
    async with LOCK:
        CALLS.append(("try", 0.0))
        if sum(name == "try" for name, _ in CALLS) % 10 <= failures:
            raise ConnectionError("again")
    return f"{os.environ.get('HOME') is not None}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "wrapped coroutine")  # noqa: F405
@plain
async def wrapped(_ctx, number: int) -> int:
    """A coroutine function behind an ordinary one; it can ask ordinary functions that wait."""
    return number + len(task.get_running_tasks()) + len(timer.get_timers(_ctx.chat_key))  # noqa: F405


class Service:
    """State in an object, methods of the object mounted."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def remember(self, _ctx, word: str) -> int:
        """Remember a word."""
        self.seen.append(word)
        return len(self.seen)

    @staticmethod
    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "static")  # noqa: F405
    async def shout(_ctx, word: str) -> str:
        """A static method."""
        return word.upper()


service = Service()
plugin.mount_sandbox_method(SandboxMethodType.TOOL, "bound")(service.remember)  # noqa: F405


def make(unit):
    async def convert(_ctx, value: float) -> str:
        return f"{value:g} {unit}"

    convert.__name__ = f"to_{unit}"
    convert.__doc__ = f"Return a value in {unit}."
    return plugin.mount_sandbox_method(SandboxMethodType.TOOL, f"to {unit}")(convert)  # noqa: F405


CONVERTERS = [make(unit) for unit in ("metres", "feet")]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "all")  # noqa: F405
async def convert_all(_ctx, value: float) -> list[str]:
    """Calls the decorated functions as functions."""
    return [await convert(_ctx, value) for convert in CONVERTERS] + [await Service.shout(_ctx, "done")]
