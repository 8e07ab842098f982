"""Resources: the history and the files of chats, and jobs, which tools show, await and cancel."""

from __future__ import annotations

import asyncio
import base64
import os
import re
from itertools import islice
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    TextResourceContents,
)

from nekro.app.approvals.shown import call_line
from nekro.app.services import Services
from nekro.base.plain import encodable
from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.results import Report, data_result, text_of
from nekro.operations import work
from nekro.operations.actor import Scope
from nekro.operations.chats import list_messages, require_chat
from nekro.operations.pages import cursor_of
from nekro.operations.pages import text_of as position_of
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import InvalidValueError, NotFoundError, UsageError
from nekro_agent.files.names import HEAD_BYTES, content_type
from nekro_agent.ports import ChatInfo
from nekro_client.models import Job
from storage.accounts.approvals import Approval
from storage.states import ApprovalState

__all__ = [
    "awaiting",
    "awaiting_text",
    "cancel",
    "chat_of",
    "job_uri",
    "list_resources",
    "list_templates",
    "messages_uri",
    "read_resource",
    "show",
    "wait_for",
]


_MOST_SHOWN = 20
#: Longest wait: clients give up on a request before it.
_MOST_SECONDS = 600.0


def job_uri(job_id: str) -> str:
    """Return the URI of a job's resource."""
    return f"nekro://jobs/{job_id}"


async def show(services: Services, caller: Caller, job_id: str | None) -> CallToolResult:
    """Return a job, or the newest ones of the caller's chat if it is None."""
    caller.identity.require(Scope.READ, chat_key=caller.chat_key)
    if job_id is not None:
        return (await _seen(services, caller, job_id)).result
    page = await work.list_jobs(caller.actor(services), chat_key=caller.chat_key, limit=_MOST_SHOWN)
    found = [job.model_dump(mode="json") for job in page.items]
    return data_result({"jobs": found}, "\n".join(map(_line, page.items)) or "the chat has no jobs")


async def wait_for(
    services: Services, caller: Caller, job_id: str, seconds: float, *, report: Report | None
) -> CallToolResult:
    """Wait for the end of a job, at most ``seconds``, and return it.

    Args:
        job_id: also of a call that waits for approval, and is a job when a person has permitted it.
    """
    caller.identity.require(Scope.READ)
    loop = asyncio.get_running_loop()
    until = loop.time() + min(max(seconds, 0.0), _MOST_SECONDS)
    reported = -1
    while True:
        seen = await _seen(services, caller, job_id)
        if seen.is_final or loop.time() >= until:
            return seen.result
        if report is not None and seen.percent > reported:
            reported = seen.percent
            await report(reported, 100, seen.message)
        await asyncio.sleep(REFRESH_SECONDS)


async def cancel(services: Services, caller: Caller, job_id: str) -> CallToolResult:
    """Cancel a job."""
    return _result(await work.cancel_job(caller.actor(services), job_id))


class _Seen(NamedTuple):
    """A job, or a call that waits for approval, as it is now."""

    is_final: bool
    percent: int
    message: str
    result: CallToolResult


async def _seen(services: Services, caller: Caller, job_id: str) -> _Seen:
    try:
        job = await work.get_job(caller.actor(services), job_id)
    except NotFoundError:
        async with services.database.read() as transaction:
            approval = await transaction.approvals.of_call(job_id)
        if approval is None or not caller.identity.has_chat(approval.chat_key):
            raise
        is_over = approval.state not in (ApprovalState.PENDING, ApprovalState.APPROVED)
        return _Seen(is_over, 0, "", _result_of_approval(approval))
    return _Seen(job.finished_at is not None, job.percent, job.message, _result(job))


def _result_of_approval(row: Approval) -> CallToolResult:
    if row.state is ApprovalState.PENDING:
        return awaiting(row)
    state = row.state.value
    text = f"approval of {call_line(row.method, row.arguments)} was {state}" + (
        f": {row.reason}" if row.reason else ""
    )
    return data_result({"job_id": row.call_id, "approval_id": row.id, "state": state}, text)


def awaiting(row: Approval) -> CallToolResult:
    """Return the result of a call that did not run yet, because a person must permit it."""
    data = {
        "job_id": row.call_id,
        "approval_id": row.id,
        "number": row.number,
        "call": call_line(row.method, row.arguments),
        "state": "awaiting",
    }
    return data_result(data, awaiting_text(row))


def awaiting_text(row: Approval) -> str:
    """Say what a call waits for, and how to learn its outcome."""
    return (
        f"{call_line(row.method, row.arguments)} waits until a person approves it (approval {row.number}); "
        f"it did not run. wait_for_job with {row.call_id!r} waits for the decision and the result. Do not "
        "call it again."
    )


def _result(job: Job) -> CallToolResult:
    return data_result(job.model_dump(mode="json"), _line(job))


def _line(job: Job) -> str:
    shown = job.message or ("" if job.finished_at is not None else f"{job.percent} %")
    state = "succeeded" if job.state == "done" else job.state
    return f"job {job.id} ({job.type}) is {state}" + (f": {shown}" if shown else "")


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
        RefusedError: the cursor is none of ours.
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
        newest = await transaction.jobs.newest(limit=_MOST_JOBS, chat_key=caller.chat_key)
        own = await transaction.chats.find(caller.chat_key)
    found = [_history(chat) for chat in chats]
    found += [
        Resource(uri=job_uri(job.id), name=job.id, title=f"{job.type} ({job.state})", mime_type=_JSON)
        for job in newest
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
        RefusedError: the key may not read.
        NotFoundError: there is no such resource, or it belongs to a chat that the key does not have.
        InvalidValueError: the file is too large.
    """
    caller.identity.require(Scope.READ)
    if match := _HISTORY.fullmatch(uri):
        return _text(uri, await _messages(services, caller, _plain(match[1]), before=match[2]))
    if match := _FILE.fullmatch(uri):
        chat = await _chat(services, caller, match[1])
        return await asyncio.to_thread(_content, services, chat, uri, _plain(match[2]))
    if match := _JOB.fullmatch(uri):
        job = await work.get_job(caller.actor(services), _plain(match[1]))
        return _text(uri, job.model_dump(mode="json"))
    raise NotFoundError(f"there is no resource {uri[:500]!r}")


async def _chat(services: Services, caller: Caller, quoted: str) -> ChatInfo:
    chat_key = _plain(quoted)
    caller.identity.require(Scope.READ, chat_key=chat_key)
    async with services.database.read() as transaction:
        return await require_chat(transaction, chat_key)


async def _messages(
    services: Services, caller: Caller, chat_key: str, *, before: str | None
) -> dict[str, object]:
    """Return a page of a history, the oldest message first.

    Args:
        before: the sequence that they are older than; None begins with the newest.
    """
    cursor = None if before is None else cursor_of(before)
    page = await list_messages(
        caller.actor(services), chat_key, limit=_MESSAGES, cursor=cursor, with_past=before is not None
    )
    items = [message.model_dump(mode="json") for message in reversed(page.items)]
    older = f"{messages_uri(chat_key)}/{page.items[-1].sequence}" if page.next_cursor else None
    return {"chat_key": chat_key, "messages": items, "older": older}


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
