"""Timers, once and again."""

import time

from nekro_agent.api import recurring_timer, timer
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(name="timers", module_name="with_timers", description="", version="1", author="Ada", url="")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "remind")
async def remind(_ctx: AgentCtx, seconds: int, text: str, temporary: bool = False) -> bool:
    """Set a timer."""
    set_one = timer.set_temp_timer if temporary else timer.set_timer
    return await set_one(_ctx.chat_key, int(time.time()) + seconds, text)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "list")
async def reminders(_ctx: AgentCtx) -> list:
    """List timers."""
    return [t.event_desc for t in await timer.get_timers(_ctx.chat_key)]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "daily")
async def daily(_ctx: AgentCtx, cron: str, text: str, zone: str = "Asia/Tokyo") -> str:
    """Create a recurring timer."""
    job = await recurring_timer.create_cron_job(
        chat_key=_ctx.chat_key, cron_expr=cron, event_desc=text, timezone=zone, workday_mode="mon_fri", title=None
    )
    return job.job_id
