"""Decodes bodies that a server compresses although it was asked not to."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from typing import Final

from nekro_agent.downloads.patience import Interrupted
from nekro_agent.downloads.socket import BLOCK_BYTES
from nekro_agent.errors import DownloadError, DownloadRefusedError

__all__ = ["decoded", "encoding_of"]

_GZIP: Final = frozenset({"gzip", "x-gzip"})
#: For ``zlib.decompressobj``: a gzip header, and one of zlib.
_WINDOWS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def encoding_of(header: str | None, *, url: str) -> str | None:
    """Return the encoding of a body, ``gzip`` or ``deflate``; None if it is not encoded.

    Raises:
        DownloadRefusedError: it has another encoding, or several.
    """
    names = [name.strip().lower() for name in (header or "").split(",")]
    names = ["gzip" if name in _GZIP else name for name in names if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _WINDOWS:
        raise DownloadRefusedError(
            f"{url} sends its content encoded as {', '.join(names)[:100]!r}, although it was asked not to"
        )
    return names[0]


async def decoded(body: AsyncIterator[bytes], encoding: str, *, url: str) -> AsyncIterator[bytes]:
    """Yield the decoded body in blocks of limited size, however much a piece of it expands.

    Raises:
        DownloadError: it is not encoded as stated.
        Interrupted: it ends too early.
    """
    decoder = zlib.decompressobj(_WINDOWS[encoding])
    async for piece in body:
        while piece:
            if decoder.eof:  # the next of several members
                decoder = zlib.decompressobj(_WINDOWS[encoding])
            try:
                block = decoder.decompress(piece, BLOCK_BYTES)
            except zlib.error as exc:
                raise DownloadError(f"{url} sends a body that is not encoded as {encoding}: {exc}") from exc
            if block:
                yield block
            piece = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    if not decoder.eof:
        raise Interrupted(f"{url} broke off within a body that is encoded as {encoding}")
