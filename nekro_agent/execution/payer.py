"""On whose account running code works: for whom it asks models, and who pays for the turns that it starts.

An account is the id of a turn, of a run, call, timer or job outside of turns, or of a key of the API
(``storage.accounts.keys``). What the code writes for later, such as a timer, is on the same account.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from nekro_agent.schemas.call_context import CallContext

__all__ = ["Payer", "begin_account", "current_account", "current_payer", "on_account", "payer_of", "paying"]


@dataclass(frozen=True, kw_only=True)
class Payer:
    """The plugin whose code runs, and for whom; None where there is no such thing."""

    plugin_key: str
    chat_key: str | None = None
    #: Platform id.
    user_id: str | None = None
    adapter_key: str | None = None
    turn_id: str | None = None
    #: The account besides the turn.
    account_id: str | None = None
    #: Most tokens that the plugin may use in a day (UTC); None: no limit of its own.
    tokens_per_day: int | None = None


_current: Final[ContextVar[Payer | None]] = ContextVar("nekro_payer", default=None)
_account: Final[ContextVar[str | None]] = ContextVar("nekro_account", default=None)


@contextmanager
def paying(payer: Payer) -> Iterator[None]:
    """Let the block, and the tasks that it starts, work on an account.

    Code that runs for a chat stays on the account of its cause if the payer names none. Other code, such as
    an init hook, leaves it, because its tasks outlive the cause.
    """
    token = _current.set(payer)
    inherited = current_account() if payer.chat_key else None
    try:
        with on_account(payer.turn_id or payer.account_id or inherited):
            yield
    finally:
        _current.reset(token)


@contextmanager
def on_account(account_id: str | None) -> Iterator[None]:
    """Let the block, and the tasks that it starts, work on an account; None: on none."""
    token = _account.set(account_id)
    try:
        yield
    finally:
        _account.reset(token)


def begin_account(account_id: str | None) -> None:
    """Let the rest of this task work on an account: for a request, which is a task of its own."""
    _account.set(account_id)


def current_account() -> str | None:
    """Return the account of the running code; None if nothing that has one caused it."""
    return _account.get()


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
