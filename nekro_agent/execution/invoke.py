"""Runs one sandbox method and converts its result to the form that its type requires."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Final

from pydantic import BaseModel

from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import ArgumentError, ResultError
from nekro_agent.execution.greenlets import Bridged
from nekro_agent.files import staging
from nekro_agent.methods import SandboxMethod, SandboxMethodType, describe_signature, takes_context_second
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["Outcome", "call_method", "run_callable", "segments_of"]

_log = get_sub_logger("methods")

_GENERATORS: Final = (GeneratorType, AsyncGeneratorType)
#: Most call shapes remembered per method, because code may use any number.
_MAX_SHAPES: Final = 64
#: Most synchronous functions that run concurrently in one process.
_MAX_THREADS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a method, by type.

    TOOL: ``value``. BEHAVIOR: ``value`` for the code and ``text`` for the chat's history. AGENT:
    ``text``. MULTIMODAL_AGENT: ``segments``, OpenAI content parts.
    """

    type: SandboxMethodType
    value: Any = None
    text: str | None = None
    segments: list[dict[str, Any]] | None = None


async def call_method(
    method: SandboxMethod, ctx: AgentCtx, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Outcome:
    """Run a method with ``ctx`` as its first positional argument.

    Coroutine functions run here; other functions run in a thread, so that blocking code does not
    block the event loop. The plugin's own exceptions propagate unchanged.

    Raises:
        ArgumentError: the arguments do not match the signature.
        ResultError: the method yields, or a MULTIMODAL_AGENT method did not return content parts.
    """
    callee = _callee(method.func)
    args, kwargs = _fitted(callee, ctx, args, kwargs)
    async with staging.call_scope(ctx.fs):
        result = await _run(method.func, callee.is_coroutine_function, args, kwargs)
    return _outcome(method, result)


def run_callable(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
    """Call plugin code: a coroutine function on this loop, any other function in a thread."""
    return _run(func, inspect.iscoroutinefunction(func), args, kwargs)


def _run(
    func: Callable[..., Any], is_coroutine_function: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Awaitable[Any]:
    return Bridged(func(*args, **kwargs)) if is_coroutine_function else _run_in_thread(func, args, kwargs)


async def _run_in_thread(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    run = functools.partial(contextvars.copy_context().run, func, *args, **kwargs)
    result = await asyncio.get_running_loop().run_in_executor(_threads(), run)
    # A decorator may have wrapped a coroutine function in a synchronous one.
    if inspect.iscoroutine(result):
        return await Bridged(result)
    return await result if isinstance(result, Awaitable) else result


def _fitted(
    callee: _Callee, ctx: AgentCtx, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = dict(kwargs)
    swapped = callee.swapped
    if swapped is not None and swapped[0] in named:
        # Declared as (command, ctx): the first parameter always receives the context, so the argument
        # that the code passes under that name belongs to the second.
        named[swapped[1]] = named.pop(swapped[0])
    shape = (len(args), *named)
    if shape not in callee.fitting:
        try:
            callee.signature.bind(ctx, *args, **named)
        except TypeError as exc:
            raise ArgumentError(f"{callee.func.__name__}{describe_signature(callee.func)}: {exc}") from None
        if len(callee.fitting) < _MAX_SHAPES:
            callee.fitting.add(shape)
    return (ctx, *args), named


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # Not the loop's own executor: blocking methods would delay name resolution and file writes.
    return ThreadPoolExecutor(max_workers=_MAX_THREADS, thread_name_prefix="nekro-method")


@dataclass(frozen=True, slots=True)
class _Callee:
    """Properties of a method's function, computed once."""

    func: Callable[..., Any]
    is_coroutine_function: bool
    signature: inspect.Signature
    #: See ``takes_context_second``.
    swapped: tuple[str, str] | None
    #: Shapes (number and names of arguments) that matched; the match depends on nothing else.
    fitting: set[tuple[object, ...]]


@functools.lru_cache(maxsize=4096)
def _callee(func: Callable[..., Any]) -> _Callee:
    signature = inspect.signature(func)
    is_coroutine_function = inspect.iscoroutinefunction(func)
    return _Callee(func, is_coroutine_function, signature, takes_context_second(signature), set())


def _outcome(method: SandboxMethod, result: Any) -> Outcome:
    kind = method.method_type
    if isinstance(result, _GENERATORS):
        raise ResultError(
            f"{method.func.__name__} uses yield, so its result is a generator; "
            "a sandbox method must return its result"
        )
    if kind is SandboxMethodType.TOOL:
        return Outcome(type=kind, value=result)
    if kind is SandboxMethodType.MULTIMODAL_AGENT:
        return Outcome(type=kind, segments=segments_of(result, name=method.func.__name__))
    if not isinstance(result, str):
        _log.bind(
            method=method.func.__name__, method_type=kind.value, returned=type(result).__name__
        ).warning("method_result_converted_to_text")
    text = str(result)
    return Outcome(type=kind, text=text, value=result if kind is SandboxMethodType.BEHAVIOR else None)


def segments_of(result: Any, *, name: str) -> list[dict[str, Any]]:
    """Return the result of a MULTIMODAL_AGENT method as a list of OpenAI content parts.

    Accepted: a list of parts and texts, one part, a text, or a message with ``role`` and ``content``.

    Raises:
        ResultError: it has another form; the message names the method and the type.
    """
    if isinstance(result, BaseModel):
        result = result.model_dump(mode="json")
    if isinstance(result, dict) and "content" in result and "type" not in result:
        return segments_of(result["content"], name=name)
    if isinstance(result, str):
        return [{"type": "text", "text": result}]
    if isinstance(result, dict):
        result = [result]
    if not isinstance(result, list | tuple) or not result:
        got = f"{type(result).__name__}" if result else f"an empty {type(result).__name__}"
        raise ResultError(
            f"{name} must return content parts: a list of {{'type': …}} parts, one part, a text, "
            f"or a message with role and content; it returned {got}"
        )
    return [_segment(part, name=name) for part in result]


def _segment(part: Any, *, name: str) -> dict[str, Any]:
    if isinstance(part, BaseModel):
        part = part.model_dump(mode="json")
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        return part
    raise ResultError(f"{name} returned a content part without a type: {type(part).__name__}")
