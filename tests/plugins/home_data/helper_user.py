"""小助手: the helpers that plugins import from the reference."""

from nekro_agent.api import recurring_timer
from nekro_agent.api.core import get_qdrant_client
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage, ChatType
from nekro_agent.services.message_service import message_service
from nekro_agent.tools.at_markup import neutralize_at_all_markup
from nekro_agent.tools.image_utils import process_image_data_url
from nekro_agent.tools.message_id import normalize_ref_msg_id

plugin = NekroPlugin(
    name="小助手", module_name="helper_user", description="", version="1.0.0", author="Bob", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="清理", description="")
async def clean(_ctx: AgentCtx, text: str, ref: str) -> list:
    """Return a text that notifies nobody, and the id of a message."""
    return [neutralize_at_all_markup(text), normalize_ref_msg_id(ref)]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="压缩", description="")
async def shrink(_ctx: AgentCtx, url: str, limit: int) -> str:
    """Return a smaller image."""
    return await process_image_data_url(url, max_size=limit)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="记录", description="")
async def record(_ctx: AgentCtx, said: str, heard: str, is_tome: int) -> None:
    """Record what the agent has said elsewhere, and pass on what somebody said."""
    await message_service.push_bot_message(chat_key=_ctx.chat_key, agent_messages=said, ref_msg_id="m1")
    await message_service.push_human_message(
        message=ChatMessage(
            message_id="p77",
            sender_id="9",
            sender_name="Ada",
            sender_nickname="ada in the group",
            adapter_key=_ctx.adapter_key,
            platform_userid="9",
            is_tome=is_tome,
            is_recalled=False,
            chat_key=_ctx.chat_key,
            chat_type=ChatType.GROUP,
            content_text=heard,
            content_data=[],
            raw_cq_code="",
            ext_data={},
            send_timestamp=0,
        )
    )


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="定时", description="")
async def timers(_ctx: AgentCtx) -> list:
    """Create, change and list recurring timers."""
    first = await recurring_timer.create_cron_job(_ctx.chat_key, "0 9 * * *", "morning", "Asia/Shanghai")
    await recurring_timer.create_cron_job(_ctx.chat_key, "0 21 * * *", "night", "Asia/Shanghai")
    await recurring_timer.update_job(first.job_id, event_desc="later", title="T")
    await recurring_timer.pause_job(first.job_id)
    paused = await recurring_timer.list_jobs(chat_key=_ctx.chat_key, status="paused", limit=20)
    await recurring_timer.resume_job(first.job_id)
    newest = await recurring_timer.list_jobs(_ctx.chat_key, limit=1)
    return [[job.event_desc for job in paused], newest[0].title, newest[0].status, newest[0].next_run_at.hour]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="向量库", description="")
async def vectors(_ctx: AgentCtx, number: int) -> list:
    """Store a vector and return the nearest ones."""
    from qdrant_client import models

    name = plugin.get_vector_collection_name("notes")
    client = await get_qdrant_client()
    if not await client.collection_exists(collection_name=name):
        await client.create_collection(
            collection_name=name,
            vectors_config=models.VectorParams(size=2, distance=models.Distance.COSINE),
        )
    point = models.PointStruct(id=number, vector=[1.0, number / 10], payload={"text": f"note {number}"})
    await client.upsert(collection_name=name, points=[point])
    found = await client.query_points(collection_name=name, query=[1.0, 0.0], limit=9)
    return [hit.payload["text"] for hit in found.points]
