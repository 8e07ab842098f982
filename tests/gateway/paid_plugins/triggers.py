"""Everything by which code of a plugin wakes an agent, now or later."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter

from nekro_agent.api import message, recurring_timer, timer
from nekro_agent.api.plugin import (
    CmdCtl,
    CommandExecutionContext,
    NekroPlugin,
    SandboxMethodType,
    TaskCtl,
    task,
)
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.api.signal import MsgSignal
from nekro_agent.schemas.chat_message import ChatMessage
from nekro_agent.services.message_service import message_service

plugin = NekroPlugin("Triggers", "triggers", "wakes agents", "1", "tests", "http://x")
#: Within the ten years that a timer may be set ahead.
LATER = 86_400


async def push(chat_key: str) -> None:
    await message.push_system(chat_key, "wake up", trigger_agent=True)


async def say(chat_key: str) -> None:
    said = ChatMessage.create_empty(chat_key)
    said.content_text, said.sender_id, said.platform_userid, said.is_tome = "hello", "ada", "ada", 1
    await message_service.push_human_message(said, trigger_agent=True)


async def repeat(chat_key: str) -> str:
    job = await recurring_timer.create_cron_job(
        chat_key=chat_key, cron_expr="0 3 * * *", timezone="UTC", event_desc="daily"
    )
    return job.job_id


async def repeat_now(chat_key: str) -> None:
    await recurring_timer.run_now(await repeat(chat_key))


async def run(chat_key: str, way: str) -> None:
    await task.start("errand", way, chat_key, plugin, way, chat_key)


async def run_and_be_called(chat_key: str) -> None:
    async def ended(_last: TaskCtl) -> None:
        await push(chat_key)

    await task.start("errand", "watched", chat_key, plugin, "watched", chat_key, on_terminal=ended)


def later() -> int:
    return int(time.time()) + LATER


WAYS: dict[str, Callable[[str], Awaitable[object]]] = {
    "system message": push,
    "system message elsewhere": push,
    "schedule": message_service.schedule_agent_task,
    "person's message": say,
    "timer now": lambda chat_key: timer.set_timer(chat_key, 0, "now"),
    "timer": lambda chat_key: timer.set_timer(chat_key, later(), "later"),
    "temporary timer": lambda chat_key: timer.set_temp_timer(chat_key, later(), "later"),
    "recurring timer": repeat,
    "recurring timer now": repeat_now,
    "job": lambda chat_key: run(chat_key, "job"),
    "job that fails": lambda chat_key: run(chat_key, "job that fails"),
    "job that sets a timer": lambda chat_key: run(chat_key, "job that sets a timer"),
    "end of a job": run_and_be_called,
}


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "wake_by", "Wake an agent.")
async def wake_by(_ctx: AgentCtx, way: str, chat_key: str) -> str:
    """Wake the agent of a chat, in one of many ways."""
    await WAYS[way](chat_key)
    return way


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "wake_if_approved", requires_approval=True)
async def wake_if_approved(_ctx: AgentCtx, chat_key: str) -> None:
    """Wake the agent of a chat if a person permits it."""
    await push(chat_key)


@plugin.mount_async_task("errand")
async def errand(handle: Any, way: str, chat_key: str) -> Any:
    """Run in the background."""
    if way == "job that fails":
        raise RuntimeError("no luck")
    if way == "job":
        await handle.notify_agent("done")
    if way == "job that sets a timer":
        await timer.set_timer(chat_key, int(time.time()) + LATER, "later")
    yield TaskCtl.success("done")


@plugin.mount_on_user_message()
async def listen(_ctx: AgentCtx, said: ChatMessage) -> MsgSignal | None:
    """Wake another chat's agent for a person's message."""
    if said.content_text.startswith("wake "):
        await push(said.content_text.removeprefix("wake "))
        return MsgSignal.BLOCK_TRIGGER
    return None


@plugin.mount_command(name="wake", description="Wake an agent")
async def wake(context: CommandExecutionContext, chat_key: str) -> Any:
    await push(chat_key)
    yield CmdCtl.success("done")


@plugin.mount_webhook_method("wake_agent", "wake_agent", "Wake an agent")
async def receive(_ctx: AgentCtx) -> str:
    """Wake the agent of the chat that the body names."""
    await push(_ctx.webhook_request.body["chat_key"])
    return "done"


@plugin.mount_router()
def create_router() -> APIRouter:
    router = APIRouter()

    @router.post("/wake/{chat_key}")
    async def ask(chat_key: str) -> dict[str, bool]:
        await push(chat_key)
        return {"ok": True}

    return router
