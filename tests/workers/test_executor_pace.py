"""A chat's large calls do not delay other chats' calls; long messages are verified off the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker_config.settings import Settings
from codec.values import decode_value, encode_arguments
from codec.wire import Invocation, Signer, new_id
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.errors import MessageRefusedError
from storage.migrate import upgrade
from workers.calls.executor import MethodExecutor
from workers.composition import Services
from workers.plugins.registry import Registry

KEY = "test-signing-key"
METHOD = "tests.p.length"
LARGE = "x" * (8 << 10)
COSTLY: list[object] = [{}] * 20_000
LONG = "x" * (256 << 10)


class NotingSigner(Signer):
    """Records which thread verified."""

    threads: tuple[str, ...] = ()

    def verify(self, body: object, *, task_name: str | None = None) -> Invocation:
        self.threads += (threading.current_thread().name,)
        return super().verify(body, task_name=task_name)


@pytest.fixture
def signer() -> NotingSigner:
    return NotingSigner.from_text(KEY)


@pytest.fixture
async def executor(make_settings: Callable[..., Settings], signer: NotingSigner) -> MethodExecutor:
    settings = make_settings()
    plugin = NekroPlugin("P", "p", "", "1", "tests", "")

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "length")
    async def length(_ctx: AgentCtx, text: str) -> int:
        """Return a text's length."""
        return len(text)

    await upgrade(settings.database, settings.data_dir)
    services = Services.load(settings, role="methods")
    services.registry = Registry([plugin])
    executor = services.executor
    executor._signer = signer
    return executor


def body(text: object, chat_key: str) -> dict[str, Any]:
    now = datetime.now(UTC)
    return Signer.from_text(KEY).sign(
        Invocation(
            call_id=new_id(),
            method=METHOD,
            chat_key=chat_key,
            container_key="k",
            issued_at=now,
            deadline=now + timedelta(seconds=600),
            args=encode_arguments((text,), {}),
        )
    )


async def call(executor: MethodExecutor, text: object, chat_key: str) -> object:
    answer = await executor.execute(body(text, chat_key), task_name=METHOD)
    return decode_value(answer["value"], max_bytes=100)


async def test_a_large_call_is_delayed_by_its_chats_last_ones_and_other_calls_are_not(
    executor: MethodExecutor,
) -> None:
    for _ in range(100):  # far longer than this test takes
        executor._pace.spent("heavy", 60)
    await call(executor, "light", "light")
    waiting = asyncio.create_task(call(executor, LARGE, "heavy"))
    for text, chat_key in (("small", "heavy"), *[(LARGE, "light")] * 3):
        assert await call(executor, text, chat_key) == len(text)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_costly_calls_are_charged_to_their_chat_and_small_ones_are_not(
    executor: MethodExecutor,
) -> None:
    await call(executor, COSTLY, "heavy")
    await call(executor, "small", "light")
    assert set(executor._pace._free_at) == {"heavy"}


async def test_long_messages_are_verified_off_the_loop(
    executor: MethodExecutor, signer: NotingSigner
) -> None:
    here = threading.current_thread().name
    assert await call(executor, "small", "c") == 5
    assert signer.threads == (here,)
    assert await call(executor, LONG, "c") == len(LONG)
    assert signer.threads[1] != here
    altered = body(LONG, "c")
    altered["invocation"]["chat_key"] = "another"
    with pytest.raises(MessageRefusedError, match="signature does not match"):
        await executor.execute(altered, task_name=METHOD)
