"""Takes stream tickets out of URLs, before anything can log them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from starlette.types import Scope

__all__ = ["UrlTicket", "take_ticket"]

#: The only requests with tickets.
_STREAM: Final = re.compile(rb"/api/v1/(?:chats/([^/?]+)/events|changes)(?:\?.*)?")


class UrlTicket(NamedTuple):
    """A ticket as a URL had it, and the chat of the URL."""

    #: "" for the stream of changes; no chat has this key.
    chat_key: str
    #: "" if the URL had several.
    text: str


def take_ticket(scope: Scope) -> UrlTicket | None:
    """Remove the ticket from the URL of a request for a stream, and return it.

    None: it is a request for something else, or has no ticket.
    """
    match = _STREAM.fullmatch(scope.get("raw_path") or b"")
    if match is None or b"ticket=" not in scope["query_string"]:
        return None
    fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    texts = [value for name, value in fields if name == "ticket"]
    if not texts:
        return None
    rest = [field for field in fields if field[0] != "ticket"]
    scope["query_string"] = urlencode(rest, errors="surrogateescape").encode("ascii")
    # Several could mean different tickets to different readers of the URL.
    return UrlTicket(unquote((match[1] or b"").decode("latin-1")), texts[0] if len(texts) == 1 else "")
