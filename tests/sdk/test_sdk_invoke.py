"""Invocation of methods of any kind and with any parameter names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from nekro.plugins.invoke import call_method
from nekro_agent.methods import SandboxMethod, SandboxMethodType
from nekro_agent.schemas.agent_ctx import AgentCtx


async def returned(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a TOOL of this function returns."""
    method = SandboxMethod(method_type=SandboxMethodType.TOOL, name="it", description="", func=func)
    return (await call_method(method, AgentCtx.for_call(chat_key="chat"), args, kwargs)).value


async def waiting(ctx: AgentCtx, func: str, args: int, kwargs: int = 2) -> tuple[str, int, int]:
    return func, args, kwargs


def blocking(ctx: AgentCtx, func: str, args: int, kwargs: int = 2) -> tuple[str, int, int]:
    return func, args, kwargs


@pytest.mark.parametrize("method", [waiting, blocking])
async def test_parameters_may_have_any_name(method: Callable[..., Any]) -> None:
    for _ in range(2):
        assert await returned(method, func="f", args=1) == ("f", 1, 2)
        assert await returned(method, "f", args=1, kwargs=3) == ("f", 1, 3)


@dataclass(frozen=True)
class Counter:
    """A callable object, equal to all others."""

    start: int = field(compare=False)

    @property
    def __name__(self) -> str:
        return "count"

    def __call__(self, ctx: AgentCtx, more: int) -> int:
        return self.start + more


async def test_equal_callables_are_each_called_themselves() -> None:
    first, second = Counter(10), Counter(20)
    assert first == second
    assert [await returned(each, 1) for each in (first, second, first)] == [11, 21, 11]
