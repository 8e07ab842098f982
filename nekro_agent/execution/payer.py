"""On whose account running code of plugins asks models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from nekro_agent.schemas.call_context import CallContext

__all__ = ["Payer", "current_payer", "payer_of", "paying"]


@dataclass(frozen=True, kw_only=True)
class Payer:
    """The plugin whose code runs, and for whom; None where there is no such thing."""

    plugin_key: str
    chat_key: str | None = None
    #: Platform id.
    user_id: str | None = None
    adapter_key: str | None = None
    turn_id: str | None = None
    #: The run or call outside of turns for which a key of the API may pay.
    account_id: str | None = None
    #: Most tokens that the plugin may use in a day (UTC); None: no limit of its own.
    tokens_per_day: int | None = None


_current: Final[ContextVar[Payer | None]] = ContextVar("nekro_payer", default=None)


@contextmanager
def paying(payer: Payer) -> Iterator[None]:
    """Let the block, and the tasks that it starts, ask models on an account."""
    token = _current.set(payer)
    try:
        yield
    finally:
        _current.reset(token)


def current_payer() -> Payer | None:
    """Return the account of the running code; None outside of code of plugins."""
    return _current.get()


def payer_of(plugin_key: str, *arguments: object) -> Payer:
    """Return the account of code that runs for the first context among its arguments."""
    ctx = next((argument for argument in arguments if isinstance(argument, CallContext)), None)
    if ctx is None:
        return Payer(plugin_key=plugin_key)
    return Payer(
        plugin_key=plugin_key,
        chat_key=ctx.from_chat_key,
        user_id=ctx.from_platform_userid,
        adapter_key=ctx.adapter_key,
    )
