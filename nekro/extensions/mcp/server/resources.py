"""Resources: the history and the files of chats, and jobs."""

from __future__ import annotations

import asyncio
import base64
import re
from contextlib import ExitStack
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

from nekro.app.chats.attachments import FileRef
from nekro.base.plain import encodable
from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.results import text_of
from nekro.operations.actor import Scope
from nekro.operations.chats import list_messages, readable_chats
from nekro.operations.files import list_files, open_file
from nekro.operations.pages import cursor_of
from nekro.operations.pages import text_of as position_of
from nekro.operations.work import get_job, list_jobs
from nekro_agent.errors import InvalidValueError, NotFoundError
from nekro_agent.files.names import content_type
from nekro_client.models import FileInfo, Job
from storage.listings.chats import ListedChat

__all__ = [
    "chat_of",
    "job_state",
    "job_uri",
    "list_resources",
    "list_templates",
    "messages_uri",
    "read_resource",
]


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


def job_uri(job_id: str) -> str:
    """Return the URI of a job's resource."""
    return f"nekro://jobs/{job_id}"


def job_state(job: Job) -> str:
    """Return the state of a job in words for models."""
    return "succeeded" if job.state == "done" else job.state


def messages_uri(chat_key: str) -> str:
    """Return the URI of a chat's history."""
    return f"nekro://chats/{_quoted(chat_key)}/messages"


def chat_of(uri: str) -> str | None:
    """Return the chat whose history or file a URI names; None if it names neither."""
    match = _HISTORY.fullmatch(uri) or _FILE.fullmatch(uri)
    return None if match is None else unquote(match[1], errors="surrogateescape")


async def list_resources(caller: Caller, cursor: str | None) -> ListResourcesResult:
    """Return a page, in the order of the URIs: histories of the key's chats, files and jobs of the caller's.

    Raises:
        RefusedError: the cursor is none of ours.
    """
    if Scope.READ not in caller.identity.scopes:
        return ListResourcesResult(resources=[])
    after = "" if cursor is None else position_of(cursor)
    jobs = await list_jobs(caller.actor, chat_key=caller.chat_key, limit=_MOST_JOBS)
    found = [
        *map(_history, await readable_chats(caller.actor, limit=_MOST_CHATS)),
        *map(_job, jobs.items),
        *(_file(caller.chat_key, file) for file in await _files(caller)),
    ]
    found = sorted((one for one in found if one.uri > after), key=lambda one: one.uri)
    more = cursor_of(found[_PAGE - 1].uri) if len(found) > _PAGE else None
    return ListResourcesResult(resources=found[:_PAGE], next_cursor=more)


async def _files(caller: Caller) -> list[FileInfo]:
    try:
        return (await list_files(caller.actor, caller.chat_key, limit=_MOST_FILES)).items
    except NotFoundError:  # nothing has happened in the chat yet
        return []


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


async def read_resource(caller: Caller, uri: str) -> ReadResourceResult:
    """Return the content of a resource.

    Raises:
        RefusedError: the key may not read.
        NotFoundError: there is no such resource, or it belongs to a chat that the key does not have.
        InvalidValueError: the file is too large.
    """
    caller.identity.require(Scope.READ)
    if match := _HISTORY.fullmatch(uri):
        return _text(uri, await _messages(caller, _plain(match[1]), before=match[2]))
    if match := _FILE.fullmatch(uri):
        return await _content(caller, uri, _plain(match[1]), _plain(match[2]))
    if match := _JOB.fullmatch(uri):
        job = await get_job(caller.actor, _plain(match[1]))
        return _text(uri, job.model_dump(mode="json"))
    raise NotFoundError(f"there is no resource {uri[:500]!r}")


async def _messages(caller: Caller, chat_key: str, *, before: str | None) -> dict[str, object]:
    """Return a page of a history, the oldest message first.

    Args:
        before: the sequence that they are older than; None begins with the newest.
    """
    cursor = None if before is None else cursor_of(before)
    page = await list_messages(
        caller.actor, chat_key, limit=_MESSAGES, cursor=cursor, with_past=before is not None
    )
    items = [message.model_dump(mode="json") for message in reversed(page.items)]
    older = f"{messages_uri(chat_key)}/{page.items[-1].sequence}" if page.next_cursor else None
    return {"chat_key": chat_key, "messages": items, "older": older}


def _history(chat: ListedChat) -> Resource:
    return Resource(
        uri=messages_uri(chat.chat_key),
        name=str(encodable(chat.chat_key)),
        title=str(encodable(chat.title or chat.channel_name or "")) or None,
        description="Messages of the chat",
        mime_type=_JSON,
    )


def _job(job: Job) -> Resource:
    return Resource(uri=job_uri(job.id), name=job.id, title=f"{job.type} ({job_state(job)})", mime_type=_JSON)


def _file(chat_key: str, file: FileInfo) -> Resource:
    return Resource(
        uri=f"nekro://chats/{_quoted(chat_key)}/files{_quoted(file.path, safe='/')}",
        name=str(encodable(file.name)),
        description=str(encodable(file.path)),
        mime_type=file.media_type,
        size=file.size_bytes,
    )


async def _content(caller: Caller, uri: str, chat_key: str, path: str) -> ReadResourceResult:
    caller.identity.require(Scope.READ, chat_key=chat_key)
    services = caller.actor.services
    most = services.settings.gateway.body_bytes
    with ExitStack() as opened:
        file, head = await open_file(services, chat_key, FileRef(path=path, modified_ns=None), opened)
        if file.size_bytes > most:
            size = f"{path} has {file.size_bytes} bytes, and a resource at most {most}"
            raise InvalidValueError(f"{size}; GET /chats/…/files serves it")

        def contents() -> TextResourceContents | BlobResourceContents:
            content = (head + file.file.read(most))[:most]
            kind = content_type(path.rpartition("/")[2], head)
            try:
                return TextResourceContents(uri=uri, mime_type=kind, text=content.decode())
            except UnicodeDecodeError:
                blob = base64.b64encode(content).decode()
                return BlobResourceContents(uri=uri, mime_type=kind, blob=blob)

        return ReadResourceResult(contents=[await asyncio.to_thread(contents)])


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
