"""A chat's large calls do not delay other chats' calls; long messages are verified off the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from broker_config.settings import Settings
from broker_config.topology import COMMAND_TASK, HOOK_TASK
from nekro.broker.fairness import ChatPace
from nekro.plugins.importing import Imported
from nekro.wire.invocation import Invocation, Signer, new_id
from nekro.wire.values import decode_value, encode_arguments
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.commands.schemas import CommandExecutionContext
from nekro_agent.errors import MessageRefusedError, MethodNotFoundError
from nekro_agent.schemas.chat_message import ChatMessage, ChatType
from storage.migrate import upgrade
from workers.calls.handler import FindTarget
from workers.services import WorkerServices

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
async def services(make_settings: Callable[..., Settings], signer: NotingSigner) -> WorkerServices:
    settings = make_settings()
    plugin = NekroPlugin("P", "p", "", "1", "tests", "")

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "length")
    async def length(_ctx: AgentCtx, text: str) -> int:
        """Return a text's length."""
        return len(text)

    @plugin.mount_on_user_message()
    async def hear(_ctx: AgentCtx, message: ChatMessage) -> int:
        return len(message.content_text)

    await upgrade(settings.database, settings.data_dir)
    services = WorkerServices.load(settings, role="methods")
    services.loaded.add(Imported(path="p.py", module="", package="", key=plugin.key, plugin=plugin))
    services.host.use(services.loaded.plugins)
    services.plugins_changed()
    services.call_handler._signer = signer
    return services


@pytest.fixture
def pace(services: WorkerServices) -> ChatPace:
    return services.call_handler._pace


def body(chat_key: str, *args: object, task_name: str = METHOD) -> dict[str, Any]:
    now = datetime.now(UTC)
    return Signer.from_text(KEY).sign(
        Invocation(
            call_id=new_id(),
            method=task_name,
            chat_key=chat_key,
            container_key="k",
            issued_at=now,
            deadline=now + timedelta(seconds=600),
            args=encode_arguments(args, {}),
        )
    )


async def handle(services: WorkerServices, message: dict[str, Any], find: FindTarget | None = None) -> object:
    name = message["invocation"]["method"]
    find = find or services.methods.find
    answer = await services.call_handler.handle(message, task_name=name, find=find)
    return decode_value(answer["value"], max_bytes=100)


async def call(services: WorkerServices, text: object, chat_key: str) -> object:
    return await handle(services, body(chat_key, text))


async def test_a_large_call_is_delayed_by_its_chats_last_ones_and_other_calls_are_not(
    services: WorkerServices, pace: ChatPace
) -> None:
    for _ in range(100):  # far longer than this test takes
        pace.spent("heavy", 60)
    await call(services, "light", "light")
    waiting = asyncio.create_task(call(services, LARGE, "heavy"))
    for text, chat_key in (("small", "heavy"), *[(LARGE, "light")] * 3):
        assert await call(services, text, chat_key) == len(text)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_costly_calls_are_charged_to_their_chat_and_small_ones_are_not(
    services: WorkerServices, pace: ChatPace
) -> None:
    await call(services, COSTLY, "heavy")
    await call(services, "small", "light")
    assert set(pace._free_at) == {"heavy"}


async def test_long_messages_are_verified_off_the_loop(
    services: WorkerServices, signer: NotingSigner
) -> None:
    here = threading.current_thread().name
    assert await call(services, "small", "c") == 5
    assert signer.threads == (here,)
    assert await call(services, LONG, "c") == len(LONG)
    assert signer.threads[1] != here
    altered = body("c", LONG)
    altered["invocation"]["chat_key"] = "another"
    with pytest.raises(MessageRefusedError, match="signature does not match"):
        await handle(services, altered)


async def test_large_arguments_of_hooks_and_commands_are_treated_as_those_of_methods(
    services: WorkerServices, signer: NotingSigner, pace: ChatPace
) -> None:
    here = threading.current_thread().name
    said = ChatMessage(
        chat_key="c", message_id="1", sender_id="u", sender_name="u", sender_nickname="u",
        platform_userid="u", adapter_key="a", chat_type=ChatType.GROUP, content_text=LONG, send_timestamp=1,
    )  # fmt: skip
    hook = body("hooks", "tests.p", "user_message", [said.model_dump(mode="json")], task_name=HOOK_TASK)
    assert await handle(services, hook, lambda _: services.forwarded_hooks) == len(LONG)
    who = CommandExecutionContext(user_id="u", chat_key="c", username="u", adapter_key="a")
    fields = {**who.model_dump(mode="json"), "context_data": {"costly": COSTLY}}
    line = body("commands", "/unknown", fields, task_name=COMMAND_TASK)
    await services.call_handler.handle(line, task_name=COMMAND_TASK, find=lambda _: services.command_lines)
    assert signer.threads[0] != here
    # The hook's text is charged too if reading it takes 0.5 ms, as on a busy machine.
    assert "commands" in pace._free_at
    await services.database.dispose()


async def test_a_hook_waits_for_a_plugin_that_its_worker_gets_later(services: WorkerServices) -> None:
    """Its caller may know a new MCP server before this worker looks for changes."""
    plugins = services.loaded.plugins
    services.host.use([])
    hook = body("c", "tests.p", "collect_methods", [], task_name=HOOK_TASK)
    answer = asyncio.create_task(handle(services, hook, lambda _: services.forwarded_hooks))
    await asyncio.wait({answer}, timeout=0.5)
    assert not answer.done()
    services.host.use(plugins)
    assert await answer == ["tests.p.length"]
    services.host.use([])
    with pytest.raises(MethodNotFoundError, match=r"this worker has no plugin 'tests\.p'"):
        await handle(
            services,
            body("c", "tests.p", "collect_methods", [], task_name=HOOK_TASK),
            lambda _: services.forwarded_hooks,
        )
