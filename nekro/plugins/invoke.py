"""Runs one sandbox method and converts its result to the form that its type requires."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Final

from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import ArgumentError, ResultError
from nekro_agent.execution.greenlets import run_function
from nekro_agent.files import staging
from nekro_agent.methods import (
    SandboxMethod,
    SandboxMethodType,
    describe_signature,
    segments_of,
    takes_context_second,
)
from nekro_agent.plugin import plugin_in_use
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["Outcome", "call_method"]

_log = get_sub_logger("methods")

_GENERATORS: Final = (GeneratorType, AsyncGeneratorType)
#: Most call shapes remembered per method, because code may use any number.
_MAX_SHAPES: Final = 64


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
    plugin = plugin_in_use()
    async with staging.call_scope(callee.label, ctx.fs, plugin_key=plugin.key if plugin else None):
        result = await run_function(method.func, callee.is_coroutine_function, args, kwargs)
    return _outcome(method, result)


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


@dataclass(frozen=True, slots=True)
class _Callee:
    """Properties of a method's function, computed once."""

    func: Callable[..., Any]
    #: Name for the areas that its calls use.
    label: str
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
    name = getattr(func, "__qualname__", type(func).__qualname__)
    label = f"{func.__module__}.{name}"
    return _Callee(func, label, is_coroutine_function, signature, takes_context_second(signature), set())


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
