"""Keeps an album: reads the pictures and files of messages by their segments."""

import io
import json
from pathlib import Path

from PIL import Image

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage, ChatMessageSegmentFile, ChatMessageSegmentImage
from nekro_agent.services.agent.creator import ContentSegment

plugin = NekroPlugin(
    name="Album", module_name="album", description="Pictures", version="1.0.0", author="Ada", url=""
)


@plugin.mount_on_user_message()
async def on_message(_ctx: AgentCtx, message: ChatMessage) -> None:
    seen = []
    for segment in message.content_data:
        if isinstance(segment, ChatMessageSegmentFile):
            kind = "image" if isinstance(segment, ChatMessageSegmentImage) else "file"
            seen.append([kind, segment.file_name, len(Path(segment.local_path).read_bytes())])
        else:
            seen.append([str(segment.type), segment.text])
    await plugin.store.set(chat_key=_ctx.chat_key, store_key="seen", value=json.dumps(seen))


@plugin.mount_sandbox_method(SandboxMethodType.MULTIMODAL_AGENT, "enlarge")
async def enlarge(_ctx: AgentCtx) -> list[dict[str, object]]:
    """Return a large picture."""
    target = io.BytesIO()
    Image.new("RGB", (600, 300), "red").save(target, "PNG")
    return [ContentSegment.image_content_from_bytes(target.getvalue())]
