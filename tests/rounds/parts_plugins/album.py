"""Keeps an album: reads the pictures and files of messages by their segments."""

import json
from pathlib import Path

from nekro_agent.api.plugin import NekroPlugin
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage, ChatMessageSegmentFile, ChatMessageSegmentImage

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
