"""Resources: the history and the files of chats, and jobs."""

from __future__ import annotations

import asyncio
import base64
import os
import re
from itertools import islice
from typing import Final
from urllib.parse import quote, unquote

from mcp_types import (
    BlobResourceContents,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    TextResourceContents,
)

from nekro.app.composition import Services
from nekro.base.plain import encodable
from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.jobs import find_job, job_uri
from nekro.extensions.mcp.server.results import text_of
from nekro.gateway.identity import Scope
from nekro.gateway.parts import message_answer
from nekro.gateway.web.paging import cursor_of
from nekro.gateway.web.paging import text_of as position_of
from nekro_agent.errors import InvalidValueError, NotFoundError, UsageError
from nekro_agent.files.media_types import HEAD_BYTES, content_type
from nekro_agent.ports import ChatInfo

__all__ = ["chat_of", "list_resources", "list_templates", "messages_uri", "read_resource"]

_JSON: Final = "application/json"
_PAGE: Final = 100
_MESSAGES: Final = 50
#: Newest chats, and files and jobs of the caller's chat, that are listed.
_MOST_CHATS: Final = 1000
_MOST_FILES: Final = 5000
_MOST_JOBS: Final = 200
_HISTORY: Final = re.compile(r"nekro://chats/([^/]+)/messages(?:/(\d{1,18}))?")
_FILE: Final = re.compile(r"nekro://chats/([^/]+)/files(/.+)")
_JOB: Final = re.compile(r"nekro://jobs/([^/]+)")


def messages_uri(chat_key: str) -> str:
    """Return the URI of a chat's history."""
    return f"nekro://chats/{_quoted(chat_key)}/messages"


def chat_of(uri: str) -> str | None:
    """Return the chat whose history or file a URI names; None if it names neither."""
    match = _HISTORY.fullmatch(uri) or _FILE.fullmatch(uri)
    return None if match is None else unquote(match[1], errors="surrogateescape")


async def list_resources(services: Services, caller: Caller, cursor: str | None) -> ListResourcesResult:
    """Return a page, in the order of the URIs: histories of the key's chats, files and jobs of the caller's.

    Raises:
        ProblemError: the cursor is none of ours.
    """
    if Scope.READ not in caller.identity.scopes:
        return ListResourcesResult(resources=[])
    after = "" if cursor is None else position_of(cursor)
    async with services.database.read() as transaction:
        chats = [
            chat
            for chat in await transaction.chats.newest(limit=_MOST_CHATS)
            if caller.identity.has_chat(chat.chat_key)
        ]
        jobs = await transaction.jobs.newest(limit=_MOST_JOBS, chat_key=caller.chat_key)
        own = await transaction.chats.find(caller.chat_key)
    found = [_history(chat) for chat in chats]
    found += [
        Resource(uri=job_uri(job.id), name=job.id, title=f"{job.type} ({job.state})", mime_type=_JSON)
        for job in jobs
    ]
    if own is not None:
        found += await asyncio.to_thread(_files, services, own)
    found = sorted((one for one in found if one.uri > after), key=lambda one: one.uri)
    more = cursor_of(found[_PAGE - 1].uri) if len(found) > _PAGE else None
    return ListResourcesResult(resources=found[:_PAGE], next_cursor=more)


def list_templates() -> ListResourceTemplatesResult:
    """Return the forms of the URIs."""
    forms = (
        ("messages", "nekro://chats/{chat_key}/messages", "The newest messages of a chat", _JSON),
        ("older-messages", "nekro://chats/{chat_key}/messages/{before}", "Messages before a sequence", _JSON),
        ("file", "nekro://chats/{chat_key}/files{+path}", "A file, such as /app/uploads/report.pdf", None),
        ("job", "nekro://jobs/{job_id}", "A background job", _JSON),
    )
    return ListResourceTemplatesResult(
        resource_templates=[
            ResourceTemplate(name=name, uri_template=form, description=text, mime_type=kind)
            for name, form, text, kind in forms
        ]
    )


async def read_resource(services: Services, caller: Caller, uri: str) -> ReadResourceResult:
    """Return the content of a resource.

    Raises:
        ProblemError: the key may not read.
        NotFoundError: there is no such resource, or it belongs to a chat that the key does not have.
        InvalidValueError: the file is too large.
    """
    caller.identity.require(Scope.READ)
    if match := _HISTORY.fullmatch(uri):
        chat = await _chat(services, caller, match[1])
        return _text(uri, await _messages(services, chat, before=int(match[2]) if match[2] else None))
    if match := _FILE.fullmatch(uri):
        chat = await _chat(services, caller, match[1])
        return await asyncio.to_thread(_content, services, chat, uri, _plain(match[2]))
    if match := _JOB.fullmatch(uri):
        return _text(uri, (await find_job(services, caller, _plain(match[1]))).model_dump(mode="json"))
    raise NotFoundError(f"there is no resource {uri[:500]!r}")


async def _chat(services: Services, caller: Caller, quoted: str) -> ChatInfo:
    chat_key = _plain(quoted)
    async with services.database.read() as transaction:
        chat = await transaction.chats.find(chat_key) if caller.identity.has_chat(chat_key) else None
    if chat is None:
        raise NotFoundError(f"there is no chat {chat_key!r}")
    return chat


async def _messages(services: Services, chat: ChatInfo, *, before: int | None) -> dict[str, object]:
    async with services.database.read() as transaction:
        rows = await transaction.messages.newest(
            chat.chat_key, limit=_MESSAGES, before=before, with_past=before is not None
        )
    items = [message_answer(row, services.file_ids).model_dump(mode="json") for row in rows]
    older = f"{messages_uri(chat.chat_key)}/{rows[0].sequence}" if len(rows) == _MESSAGES else None
    return {"chat_key": chat.chat_key, "messages": items, "older": older}


def _history(chat: ChatInfo) -> Resource:
    return Resource(
        uri=messages_uri(chat.chat_key),
        name=str(encodable(chat.chat_key)),
        title=str(encodable(chat.title or chat.channel_name or "")) or None,
        description="Messages of the chat",
        mime_type=_JSON,
    )


def _files(services: Services, chat: ChatInfo) -> list[Resource]:
    found = []
    files = services.files_of(chat)
    for file in islice(files.list(), _MOST_FILES):
        name = file.path.rpartition("/")[2]
        found.append(
            Resource(
                uri=f"nekro://chats/{_quoted(chat.chat_key)}/files{_quoted(file.path, safe='/')}",
                name=str(encodable(name)),
                description=str(encodable(file.path)),
                mime_type=files.type_of(file.path),
                size=file.size_bytes,
            )
        )
    return found


def _content(services: Services, chat: ChatInfo, uri: str, path: str) -> ReadResourceResult:
    most = services.settings.gateway.body_bytes
    try:
        with services.files_of(chat).open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise InvalidValueError(
                    f"{path} has {size} bytes, and a resource at most {most}; GET /chats/…/files serves it"
                )
            content = file.read(most + 1)[:most]
    except (UsageError, NotFoundError) as exc:
        raise NotFoundError("the chat has no such file") from exc
    kind = content_type(path.rpartition("/")[2], content[:HEAD_BYTES])
    try:
        text = content.decode()
    except UnicodeDecodeError:
        blob = base64.b64encode(content).decode()
        return ReadResourceResult(contents=[BlobResourceContents(uri=uri, mime_type=kind, blob=blob)])
    return ReadResourceResult(contents=[TextResourceContents(uri=uri, mime_type=kind, text=text)])


def _text(uri: str, value: object) -> ReadResourceResult:
    text = text_of(encodable(value))
    return ReadResourceResult(contents=[TextResourceContents(uri=uri, mime_type=_JSON, text=text)])


def _quoted(text: str, *, safe: str = "") -> str:
    return quote(text, safe=safe, errors="surrogatepass")


def _plain(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise NotFoundError("the URI is not UTF-8") from None
