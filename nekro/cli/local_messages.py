"""Messages that a command without a gateway posts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nekro.operations.actor import Actor
    from nekro_agent.ports import IncomingMessage
    from nekro_client.models import FileInfo, NewPart, PostedMessage

__all__ = ["send_message"]


async def send_message(
    actor: Actor,
    chat_key: str,
    text: str | None = None,
    *,
    parts: Sequence[NewPart] = (),
    files: Sequence[Path | str] = (),
    stored: Sequence[FileInfo] = (),
    user_id: str | None = None,
    user_name: str | None = None,
    to_agent: bool = True,
) -> PostedMessage:
    """Post a person's message; for the arguments see ``AsyncChat.send``."""
    from nekro.operations import posting
    from nekro_client.models import MessageBody, NewFilePart, NewImagePart, NewTextPart

    services, identity = actor.services, actor.identity
    given: list[NewPart] = [] if text is None else [NewTextPart(text=text)]
    given += parts
    for one in stored:
        kind = NewImagePart if one.media_type.startswith("image/") else NewFilePart
        given.append(kind(file_id=one.id))

    async def message() -> IncomingMessage:
        area = services.files_of(await services.chat(chat_key))
        added = [await asyncio.to_thread(area.add_file, Path(path)) for path in files]
        body = MessageBody(user_id=user_id, user_name=user_name, to_agent=to_agent)
        return await posting.incoming_message(services, identity, chat_key, body, parts=given, files=added)

    receipt = await posting.post_message(services, identity, chat_key, message, once=None)
    return posting.posted_message(services.file_ids, receipt)
