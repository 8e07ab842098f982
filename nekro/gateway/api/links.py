"""Links to files that the agent sent, for clients that send no key with them, such as a browser."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from broker_config.settings import RetentionSettings
from nekro.app.chats.attachments import Attachment
from nekro.app.chats.file_ids import FileIds
from nekro.gateway.api.files import serve_file
from nekro.gateway.dependencies import ServicesDep

__all__ = ["LINKS", "link_to", "router"]

#: Paths of links; a page of any origin may show them.
LINKS: Final = "/links/"
#: How long a link is valid if uploads are kept without limit.
_DEFAULT_DAYS: Final = 365

router = APIRouter(tags=["files"])


@router.head(LINKS + "{token}/{name}", response_class=Response, include_in_schema=False)
@router.get(LINKS + "{token}/{name}", response_class=Response)
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
