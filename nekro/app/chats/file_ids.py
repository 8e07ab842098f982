"""Ids and links of chats' files, for the HTTP API.

An id names chat, path and version of one file, with a code that only processes of the fleet can compute. The
path that a request leads to is therefore always one that such a process has stated, and an id is valid for
its chat only. Ids need no table: they are computed where a message or a list names a file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from nekro_agent.errors import NotFoundError
from nekro_agent.shared_clock import shared_now

__all__ = ["FileIds", "FileRef", "Link"]

_MAC_BYTES: Final = 16
#: Longer texts are not ids; paths have at most 4,096 bytes.
_MOST_CHARS: Final = 8192


@dataclass(frozen=True, kw_only=True)
class FileRef:
    """What an id names."""

    path: str
    #: Time of the content's last change, in nanoseconds; None: whatever the path holds.
    modified_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a link names: a file, readable without a key until a time."""

    chat_key: str
    file_id: str


class FileIds:
    """Makes and reads ids."""

    def __init__(self, key: str) -> None:
        """
        Args:
            key: secret that all processes of the fleet share.
        """
        self._key = hashlib.sha256(b"nekro file ids\0" + key.encode()).digest()

    def make(self, chat_key: str, path: str, *, modified_ns: int | None) -> str:
        """Return the id of a file of a chat; ``modified_ns`` as in ``FileRef``."""
        return self._sealed([path, modified_ns], purpose=f"file\0{chat_key}")

    def read(self, chat_key: str, file_id: str) -> FileRef:
        """Return the file that an id names.

        Raises:
            NotFoundError: it is not an id of a file of the chat.
        """
        found = self._opened(file_id, purpose=f"file\0{chat_key}")
        if found is None:
            raise NotFoundError("the chat has no such file")
        path, modified_ns = found
        return FileRef(path=path, modified_ns=modified_ns)

    def link(self, chat_key: str, file_id: str, *, until: datetime) -> str:
        """Return a token by which a file can be read without a key."""
        return self._sealed([chat_key, file_id, int(until.timestamp())], purpose="link")

    def followed(self, token: str) -> Link:
        """Return what a token names.

        Raises:
            NotFoundError: it is not valid, or its time is over.
        """
        found = self._opened(token, purpose="link")
        if found is None or found[2] < shared_now():
            raise NotFoundError("the link is not valid, or its time is over")
        return Link(chat_key=found[0], file_id=found[1])

    def _sealed(self, values: list[Any], *, purpose: str) -> str:
        body = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        return base64.urlsafe_b64encode(self._mac(purpose, body) + body).rstrip(b"=").decode()

    def _opened(self, text: str, *, purpose: str) -> list[Any] | None:
        if len(text) > _MOST_CHARS or not text.isascii():
            return None
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        code, body = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(code, self._mac(purpose, body)):
            return None
        values: list[Any] = json.loads(body.decode("utf-8", "surrogatepass"))
        return values

    def _mac(self, purpose: str, body: bytes) -> bytes:
        text = purpose.encode("utf-8", "surrogatepass")
        head = len(text).to_bytes(8, "big") + text
        return hmac.new(self._key, head + body, hashlib.sha256).digest()[:_MAC_BYTES]
