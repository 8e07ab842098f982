"""Letting ordinary functions wait inside a coroutine without holding its event loop.

Some functions of the plugin API are not coroutines although their work takes long
(``dynamic_import_pkg``) or is asynchronous (``task.is_running``), and plugins call them inside
``async def`` methods. Plugin coroutines therefore run in a greenlet of their own: such a
function switches out of it, the event loop goes on with other calls, and the greenlet is
switched in again with the result. To the coroutine nothing is different; it still belongs to
the same asyncio task.

Source: the technique of SQLAlchemy's ``greenlet_spawn``, applied around a coroutine.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Bridged", "can_wait", "wait"]

T = TypeVar("T")

#: Idle greenlets kept per thread: making one costs more than everything else here.
_MAX_IDLE: Final = 256


class _Step(NamedTuple):
    """What the inner greenlet hands out: a future of the coroutine, or an awaitable to wait for."""

    value: Any
    is_wait: bool


class _End(NamedTuple):
    """How the coroutine ended."""

    value: Any
    error: BaseException | None


class _Inner(greenlet):  # type: ignore[misc]  # greenlet has no types
    """Runs one coroutine after another; :func:`wait` works inside."""

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Drive coroutines for ever; each end is handed out like a step."""
        while True:
            end = _drive(coroutine)
            del coroutine
            coroutine = _hand_out(end)


class _Idle(threading.local):
    """This thread's greenlets that have nothing to do."""

    def __init__(self) -> None:
        self.greenlets: list[_Inner] = []


_idle = _Idle()


class Bridged(Generic[T]):
    """Awaitable that runs a coroutine inside a greenlet, so that code in it may call :func:`wait`."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        idle = _idle.greenlets
        inner = idle.pop() if idle else _Inner()
        inner.parent = getcurrent()
        # One context for both, or context variables set before the call would be invisible inside.
        inner.gr_context = getcurrent().gr_context
        outcome = inner.switch(self._coroutine)
        while isinstance(outcome, _Step):
            try:
                reply = (yield from outcome.value.__await__()) if outcome.is_wait else (yield outcome.value)
            except BaseException as exc:  # cancellation included: it belongs to the coroutine
                inner.parent = getcurrent()
                outcome = inner.throw(type(exc), exc, exc.__traceback__)
            else:
                inner.parent = getcurrent()
                outcome = inner.switch(reply)
        inner.gr_context = None
        if len(idle) < _MAX_IDLE:
            idle.append(inner)
        value, error = cast("_End", outcome)
        if error is None:
            return cast("T", value)
        try:
            raise error
        finally:
            # Its traceback holds this frame: a cycle that would keep the plugin's locals alive.
            del error, outcome


def _drive(coroutine: Coroutine[Any, Any, Any]) -> _End:
    """Run a coroutine step by step; runs in the inner greenlet."""
    advance: Any = coroutine.send
    argument: Any = None
    while True:
        try:
            future = advance(argument)
        except StopIteration as stop:
            return _End(stop.value, None)
        except GreenletExit:
            raise  # the interpreter takes the greenlet down
        except BaseException as exc:  # whatever it is, the awaiting task gets it
            return _End(None, exc)
        try:
            argument = _hand_out(_Step(future, False))
            advance = coroutine.send
        except BaseException as exc:  # thrown in by the task: the coroutine must see it
            argument, advance = exc, coroutine.throw


def can_wait() -> bool:
    """Whether :func:`wait` works here: in a plugin's coroutine itself, not in a task or thread of it."""
    return isinstance(getcurrent(), _Inner)


def wait(awaitable: Awaitable[T]) -> T:
    """Return what ``awaitable`` gives, while the event loop goes on.

    Raises:
        RuntimeError: the caller is not inside a bridged coroutine (see :func:`can_wait`).
    """
    if not can_wait():
        raise RuntimeError("wait() works directly inside a plugin's coroutine only")
    return cast("T", _hand_out(_Step(awaitable, True)))


def _hand_out(step: _Step | _End) -> Any:
    parent = getcurrent().parent
    if parent is None:
        raise RuntimeError("the greenlet of a plugin's coroutine has lost its event loop")
    return parent.switch(step)
