"""Runs functions of plugins; synchronous ones may wait inside a coroutine without blocking its event loop.

Some functions of the plugin API are synchronous although their work takes long
(``dynamic_import_pkg``) or is asynchronous (``task.is_running``), and plugins call them inside
``async def`` methods. Plugin coroutines therefore execute their steps in greenlets: such a function
switches out of its greenlet, the event loop continues with other calls, and the greenlet is
resumed with the result. Nothing changes for the coroutine; it still belongs to the same asyncio task.

A greenlet serves one step, from one ``await`` to the next: a coroutine that awaits holds none, so
thousands of waiting calls need no more memory than their coroutines.

Source: the technique of SQLAlchemy's ``greenlet_spawn``, applied around a coroutine.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Bridged", "can_wait", "run_callable", "run_function", "wait"]

T = TypeVar("T")

#: Most idle greenlets per thread; creating a greenlet costs more than everything else here.
_MAX_IDLE: Final = 256
#: Most synchronous functions that run concurrently in one process.
_MAX_THREADS: Final = 64


class _Step(NamedTuple):
    """What a greenlet hands out: a future of the coroutine, or an awaitable to wait for."""

    value: Any
    is_wait: bool


class _End(NamedTuple):
    """How the coroutine ended."""

    value: Any
    error: BaseException | None


class _Inner(greenlet):  # type: ignore[misc]  # greenlet has no types
    """Executes steps of coroutines one after another; :func:`wait` works inside."""

    def run(self, advance: Callable[[Any], Any], argument: Any) -> None:
        """Execute steps for ever, and hand out the outcome of each."""
        while True:
            outcome = _advanced(advance, argument)
            del advance, argument
            advance, argument = _hand_out(outcome)
            del outcome


class _Idle(threading.local):
    """The idle greenlets of this thread."""

    def __init__(self) -> None:
        self.greenlets: list[_Inner] = []


_idle = _Idle()


class Bridged(Generic[T]):
    """Awaitable that runs a coroutine inside a greenlet, so that code in it may call :func:`wait`."""

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine = self._coroutine
        advance: Callable[[Any], Any] = coroutine.send
        argument: Any = None
        while True:
            outcome = yield from _step(advance, argument)
            if isinstance(outcome, _End):
                break
            try:
                argument = yield outcome.value
                advance = coroutine.send
            except BaseException as exc:  # passed to the coroutine, including a cancellation
                argument, advance = exc, coroutine.throw
        value, error = outcome
        if error is None:
            return cast("T", value)
        try:
            raise error
        finally:
            # The traceback refers to this frame: a cycle that would keep the plugin's locals alive.
            del error, outcome


def _step(advance: Callable[[Any], Any], argument: Any) -> Generator[Any, Any, _Step | _End]:
    """Execute a step in a greenlet, and await whatever its code waits for."""
    idle = _idle.greenlets
    inner = idle.pop() if idle else _Inner()
    inner.parent = getcurrent()
    # Share one context: otherwise context variables set before the call would not be visible inside.
    inner.gr_context = getcurrent().gr_context
    # A new greenlet gets the arguments of ``run``, a suspended one the value that it waits for.
    outcome = inner.switch((advance, argument)) if inner else inner.switch(advance, argument)
    while isinstance(outcome, _Step) and outcome.is_wait:
        try:
            reply = yield from outcome.value.__await__()
        except BaseException as exc:  # passed to the coroutine
            inner.parent = getcurrent()
            outcome = inner.throw(type(exc), exc, exc.__traceback__)
        else:
            inner.parent = getcurrent()
            outcome = inner.switch(reply)
    inner.gr_context = None
    if len(idle) < _MAX_IDLE:
        idle.append(inner)
    return cast("_Step | _End", outcome)


def _advanced(advance: Callable[[Any], Any], argument: Any) -> _Step | _End:
    """Execute a step; runs in the greenlet."""
    try:
        return _Step(advance(argument), is_wait=False)
    except StopIteration as stop:
        return _End(stop.value, None)
    except GreenletExit:
        raise  # the interpreter is ending the greenlet
    except BaseException as exc:  # the awaiting task receives it, whatever it is
        return _End(None, exc)


def can_wait() -> bool:
    """Whether :func:`wait` works here: directly in a plugin's coroutine, not in its tasks or threads."""
    return isinstance(getcurrent(), _Inner)


def wait(awaitable: Awaitable[T]) -> T:
    """Return the result of ``awaitable`` while the event loop continues.

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


def run_callable(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
    """Call plugin code: a coroutine function on this loop, any other function in a thread."""
    return run_function(func, inspect.iscoroutinefunction(func), args, kwargs)


def run_function(
    func: Callable[..., Any], is_coroutine_function: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Awaitable[Any]:
    """Do as ``run_callable`` for a function whose kind is known."""
    return Bridged(func(*args, **kwargs)) if is_coroutine_function else _run_in_thread(func, args, kwargs)


async def _run_in_thread(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    run = functools.partial(contextvars.copy_context().run, func, *args, **kwargs)
    result = await asyncio.get_running_loop().run_in_executor(_threads(), run)
    # A decorator may have wrapped a coroutine function in a synchronous one.
    if inspect.iscoroutine(result):
        return await Bridged(result)
    return await result if isinstance(result, Awaitable) else result


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # Not the loop's own executor: blocking methods would delay name resolution and file writes.
    return ThreadPoolExecutor(max_workers=_MAX_THREADS, thread_name_prefix="nekro-method")
