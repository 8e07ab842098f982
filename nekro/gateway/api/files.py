"""Files of chats: stored, served, removed, and linked.

A link serves a file that the agent sent to clients that send no key with it, such as a browser.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from pydantic import RootModel

from broker_config.settings import RetentionSettings
from nekro.app.chats.attachments import Attachment, FileIds, FileRef
from nekro.app.services import Services
from nekro.gateway.dependencies import ChatKey, IdentityDep, PathText, ServicesDep
from nekro.gateway.forms import BYTES_BODY, FILES_BODY, digest_of, open_body, open_form, store_files
from nekro.gateway.idempotency import once_of
from nekro.gateway.operation_routes import ActorDep, route
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.responses import etag_of, file_response
from nekro.operations import files
from nekro.operations.actor import RefusedError, Scope
from nekro.operations.admission import KeyFiles
from nekro.operations.chats import file_info
from nekro_agent.files.names import content_type
from nekro_client.models import FileInfo

__all__ = [
    "LINKS",
    "link_router",
    "link_to",
    "router",
    "serve_file",
]


router = APIRouter(route_class=KeyedRoute, tags=["files"])

_Stored = RootModel[list[FileInfo]]

_PRIVATE: Final = {"Cache-Control": "private, no-cache"}


route(router, "GET", "/chats/{chat_key}/files", files.list_files)
route(router, "GET", "/chats/{chat_key}/file-info", files.get_file_info)


@router.put(
    "/chats/{chat_key}/files/{name}",
    status_code=HTTPStatus.CREATED,
    openapi_extra={"requestBody": BYTES_BODY},
)
async def put_file(
    chat_key: ChatKey,
    name: PathText,
    request: Request,
    response: Response,
    actor: ActorDep,
    path: Annotated[
        str | None,
        Query(
            max_length=8192,
            description="Where to store it instead, as sandboxed code writes it: a file, or a directory that "
            "ends in `/`. It needs the scope `admin` and replaces a file of its name.",
        ),
    ] = None,
    replace: Annotated[
        bool, Query(description="Replace a file of its name, if the key has the scope `admin`.")
    ] = False,
) -> FileInfo:
    """Store the body as a file in the chat's uploads; the same content again has no effect.

    409: another file has the name. 507: the chat's uploads, or the quota of the key, have no space for it.
    """
    files.require_upload(actor, chat_key, name, path=path)
    async with open_body(request, actor.services) as body:
        info = await files.put_file(actor, chat_key, name, body, path=path, replaces=replace)
    response.headers["Location"] = info.url
    return info


@router.post(
    "/chats/{chat_key}/files",
    status_code=HTTPStatus.CREATED,
    response_model=list[FileInfo],
    openapi_extra={"requestBody": FILES_BODY},
)
async def post_files(
    chat_key: ChatKey, request: Request, services: ServicesDep, identity: IdentityDep
) -> Response:
    """Store the files of a ``multipart/form-data`` body; a name in use gets a number."""
    identity.require(Scope.POST, chat_key=chat_key)

    async with open_form(request, services) as form:
        if not form.files:
            detail = "the body has no file; send files as multipart/form-data, or PUT one below its name"
            raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail)

        async def work() -> _Stored:
            stored = await store_files(KeyFiles(services, identity, chat_key), form.files)
            return _Stored([file_info(services.file_ids, chat_key, file) for file in stored])

        once = await once_of(request, body=await digest_of(form.files))
        return await once.respond(work, status=HTTPStatus.CREATED)


@router.head("/chats/{chat_key}/files/{file_id}", response_class=Response, include_in_schema=False)
@router.get("/chats/{chat_key}/files/{file_id}", response_class=Response)
async def get_file(
    chat_key: ChatKey,
    file_id: PathText,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
) -> Response:
    """Return the content of a file, or the range that is asked for. 410: it was replaced by another."""
    identity.require(Scope.READ, chat_key=chat_key)
    return await serve_file(services, chat_key, services.file_ids.read(chat_key, file_id), request)


@router.delete("/chats/{chat_key}/files/{file_id}", status_code=HTTPStatus.NO_CONTENT)
async def delete_file(chat_key: ChatKey, file_id: PathText, actor: ActorDep) -> None:
    """Remove a file. Messages keep its name."""
    await files.remove_file(actor, chat_key, file_id)


async def serve_file(services: Services, chat_key: str, ref: FileRef, request: Request) -> Response:
    """Return the answer with a file of a chat.

    Raises:
        NotFoundError: the chat or the file does not exist.
        RefusedError: 410, the content has changed since the id was made.
    """
    opened = ExitStack()
    try:
        file, head = await files.open_file(services, chat_key, ref, opened)
        name = ref.path.rpartition("/")[2]
        return file_response(
            request,
            file.file,
            opened,
            name=name,
            media_type=content_type(name, head),
            size=file.size_bytes,
            etag=etag_of(size_bytes=file.size_bytes, modified_ns=file.modified_ns),
            headers=_PRIVATE,
        )
    except BaseException:
        opened.close()
        raise


#: Paths of links; a page of any origin may show them.
LINKS: Final = "/links/"
#: How long a link is valid if uploads are kept without limit.
_DEFAULT_DAYS: Final = 365

link_router = APIRouter(tags=["files"])


@link_router.head(LINKS + "{token}/{name}", response_class=Response, include_in_schema=False)
@link_router.get(LINKS + "{token}/{name}", response_class=Response)
async def get_linked_file(token: str, name: str, request: Request, services: ServicesDep) -> Response:
    """Return the content of a file that a link names; the name is only shown."""
    ids = services.file_ids
    link = ids.followed(token)
    answer = await serve_file(services, link.chat_key, ids.read(link.chat_key, link.file_id), request)
    answer.headers["Cross-Origin-Resource-Policy"] = "cross-origin"
    return answer


def link_to(
    ids: FileIds,
    base_url: str,
    chat_key: str,
    file: Attachment,
    *,
    sent_at: datetime,
    kept: RetentionSettings,
) -> str:
    """Return the URL of a file; it is valid as long as the chat keeps files, and the same at each call.

    Args:
        base_url: address of the gateway, ending in ``/``.
    """
    file_id = ids.make(chat_key, file.path, modified_ns=file.modified_ns)
    until = sent_at + timedelta(days=kept.uploads_days or _DEFAULT_DAYS)
    token = ids.link(chat_key, file_id, until=until)
    return f"{base_url.rstrip('/')}{LINKS}{token}/{quote(file.name, safe='')}"
