"""Sends messages into a chat: to people (``send_…``) and to the LLM (``push_system``)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from nekro_agent import layout, runtime
from nekro_agent.errors import InvalidValueError
from nekro_agent.execution.current import effect_id
from nekro_agent.files import safe_files
from nekro_agent.files.areas import safe_basename
from nekro_agent.files.file_system import FileSystem
from nekro_agent.files.names import HEAD_BYTES, content_type
from nekro_agent.models.db_chat_channel import DBChatChannel
from nekro_agent.ports import OutgoingMessage
from nekro_agent.schemas.call_context import CallContext
from nekro_agent.schemas.chat_message import ChatMessage

__all__ = [
    "ChatMessage",
    "checked_chat",
    "download_from_url",
    "push_system",
    "send_file",
    "send_image",
    "send_text",
    "sent_listeners",
]

#: Called with each message that was sent and recorded, its id, and the path of its file on this host.
sent_listeners: Final[list[Callable[[OutgoingMessage, str, Path | None], Awaitable[None]]]] = []


async def send_text(
    chat_key: str, message: str, ctx: CallContext, *, record: bool = True, ref_msg_id: str | None = None
) -> None:
    """Send a text; it is recorded before this returns.

    Args:
        record: whether the LLM sees it in the chat's history.
        ref_msg_id: id of the message to which this one replies.

    Raises:
        InvalidValueError: ``chat_key`` is empty or ``message`` is not a string.
    """
    if not isinstance(message, str):
        raise InvalidValueError(f"send_text: message must be a string, not {type(message).__name__}")
    known = _checked_context("send_text", ctx)
    await _send(
        OutgoingMessage(
            chat_key=checked_chat(chat_key),
            text=message,
            record=record,
            reply_to=ref_msg_id,
            call_id=known.call_id if known else None,
            plugin_key=known.plugin_key if known else None,
            id=effect_id("message", chat_key),
        )
    )


async def send_image(
    chat_key: str,
    image_path: str | Path | None = None,
    ctx: CallContext | None = None,
    *,
    record: bool = True,
    file_path: str | Path | None = None,
    filename: str | None = None,
    file_name: str | None = None,
    ref_msg_id: str | None = None,
) -> None:
    """Send an image; see :func:`send_file`, also for ``file_path``, another name of ``image_path``."""
    path = file_path if image_path is None else image_path
    await _send_path(chat_key, path, ctx, "image", record, filename or file_name, ref_msg_id)


async def send_file(
    chat_key: str,
    file_path: str | Path,
    ctx: CallContext,
    *,
    record: bool = True,
    filename: str | None = None,
    file_name: str | None = None,
    ref_msg_id: str | None = None,
) -> None:
    """Send a file; it is copied to the chat's uploads and recorded before this returns.

    Args:
        file_path: a URL, a sandbox path, or a host path inside this plugin's data directory
            or the chat's own areas.
        filename: name to show (``file_name`` is an alias); None keeps the file's own name.

    Raises:
        InvalidValueError: the file does not exist or may not be sent.
        DownloadError: the URL could not be fetched.
        UploadQuotaError: the chat's uploads have no space for it.
    """
    await _send_path(chat_key, file_path, ctx, "file", record, filename or file_name, ref_msg_id)


async def _send_path(
    chat_key: str,
    file_path: str | Path | None,
    ctx: CallContext | None,
    kind: str,
    record: bool,
    file_name: str | None,
    ref_msg_id: str | None,
) -> None:
    if not isinstance(file_path, str | Path):
        raise InvalidValueError(
            f"send_{kind}: the path must be text or a Path, not {type(file_path).__name__}"
        )
    known = _checked_context(f"send_{kind}", ctx)
    message_id = effect_id("message", checked_chat(chat_key))
    container_key = known.container_key if known else None
    if not container_key:
        chat = await DBChatChannel.get_channel(chat_key)
        container_key = chat.container_key or layout.default_container_key(chat_key)
    files = FileSystem(chat_key, container_key, plugin_key=known.plugin_key if known else None)
    sandbox_path = await files.bring_to_uploads(str(file_path), file_name or "")
    host_path = files.upload_path / sandbox_path.removeprefix(f"{layout.SANDBOX_UPLOADS}/")
    info, media_type = await asyncio.to_thread(_facts, files.upload_path, host_path)
    await _send(
        OutgoingMessage(
            chat_key=chat_key,
            file_path=sandbox_path,
            file_name=safe_basename(file_name) if file_name else sandbox_path.rsplit("/", 1)[-1],
            file_kind=kind,
            file_media_type=media_type,
            file_size=info.st_size,
            file_modified_ns=info.st_mtime_ns,
            record=record,
            reply_to=ref_msg_id,
            call_id=known.call_id if known else None,
            plugin_key=known.plugin_key if known else None,
            id=message_id,
        ),
        host_path=host_path,
    )


def _facts(area: Path, path: Path) -> tuple[os.stat_result, str]:
    """Return the state of a file in the uploads, and its media type."""
    with safe_files.open_file(area, path.relative_to(area)) as file:
        return os.fstat(file.fileno()), content_type(path.name, file.read(HEAD_BYTES))


async def _send(message: OutgoingMessage, *, host_path: Path | None = None) -> None:
    message_id = await runtime.current().messages.send(message)
    for listener in sent_listeners if message.record else ():
        await listener(message, message_id, host_path)


async def push_system(
    chat_key: str, message: str, ctx: CallContext | None = None, trigger_agent: bool = False
) -> None:
    """Add a system message to a chat's history; people on the platform do not see it.

    Args:
        trigger_agent: whether a round of the agent is requested for it.
    """
    bound, text, known = runtime.current(), str(message), _checked_context("push_system", ctx)
    message_id = effect_id("system message", checked_chat(chat_key))
    if bound.hooks is not None and await bound.hooks.on_system_message(chat_key, text):
        return
    await bound.messages.push_system(
        chat_key,
        text,
        trigger_agent=trigger_agent,
        call_id=known.call_id if known else None,
        message_id=message_id,
    )


async def download_from_url(url: str, ctx: CallContext) -> str:
    """Download a URL into the chat's uploads and return its sandbox path."""
    known = _checked_context("download_from_url", ctx)
    if known is None:
        raise InvalidValueError("download_from_url: pass the AgentCtx, which says into whose uploads")
    return await known.fs.mixed_forward_file(url)


def checked_chat(chat_key: str) -> str:
    """Return a chat key.

    Raises:
        InvalidValueError: it is none.
    """
    if not isinstance(chat_key, str) or not chat_key:
        raise InvalidValueError(f"chat_key={chat_key!r} is not a chat key; pass _ctx.chat_key")
    return chat_key


def _checked_context(function: str, ctx: object) -> CallContext | None:
    """Return the context; None outside calls."""
    if ctx is None or isinstance(ctx, CallContext):
        return ctx
    raise InvalidValueError(f"{function}: ctx must be the AgentCtx, not {type(ctx).__name__}")
