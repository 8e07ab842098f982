"""Collects the texts that plugins add to every prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from loguru import logger

from nekro.agent.model import InjectedPrompt, PluginBrief
from nekro_agent.core.logger import log_failure, missing_name
from nekro_agent.durations import HOOK_SECONDS

__all__ = ["HOOK_SECONDS", "collect_injected"]

_ERROR_CHARS: Final = 300


async def collect_injected(
    plugins: Sequence[PluginBrief],
    *,
    redact: Callable[[str], str],
) -> list[InjectedPrompt]:
    """Run the plugins' inject methods concurrently; return their results in the plugins' order.

    A plugin that fails or takes too long loses only its own text; the prompt states the error there, but not
    that the plugin uses a name that does not exist here.
    """
    return await asyncio.gather(
        *(_inject(plugin.key, plugin.inject, redact) for plugin in plugins if plugin.inject is not None)
    )


async def _inject(
    key: str, inject: Callable[[], Awaitable[str]], redact: Callable[[str], str]
) -> InjectedPrompt:
    try:
        async with asyncio.timeout(HOOK_SECONDS) as limit:
            text = await inject()
    except BaseException as exc:  # plugin code: a SystemExit from it must not end the worker
        if _is_ours(exc):
            raise
        error = f"{type(exc).__name__}: {redact(str(exc))}"[:_ERROR_CHARS]
        if isinstance(exc, TimeoutError) and limit.expired():
            error = f"no answer within {HOOK_SECONDS:g} s"
        log_failure(logger.bind(plugin=key), "inject_failed", exc, plugin_key=key, level="WARNING")
        if missing_name(exc) is not None:  # the model can do nothing about it, in no round
            return InjectedPrompt(plugin=key, text="")
        return InjectedPrompt(plugin=key, error=error)
    return InjectedPrompt(plugin=key, text="" if text is None else str(text))


def _is_ours(exc: BaseException) -> bool:
    """Whether the exception is the cancellation of this task and not an error of the plugin."""
    task = asyncio.current_task()
    return isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling() > 0
