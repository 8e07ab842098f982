"""Files that are sent in pieces."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Final

__all__ = ["CHUNK_BYTES", "Upload"]

CHUNK_BYTES: Final = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file of this host, or bytes, as the content of a message or of an upload."""

    name: str
    media_type: str
    size_bytes: int
    source: Path | bytes

    @classmethod
    def of(cls, source: Path | str | bytes, *, name: str | None, media_type: str | None) -> Upload:
        """Describe a path, or bytes with a name.

        Raises:
            ValueError: bytes have no name.
            OSError: the file cannot be read.
        """
        if isinstance(source, bytes):
            if not name:
                raise ValueError("bytes need a name: pass name=")
            size = len(source)
        else:
            source = Path(source)
            name, size = name or source.name, source.stat().st_size
        guessed = media_type or mimetypes.guess_type(name)[0] or "application/octet-stream"
        return cls(name=name, media_type=guessed, size_bytes=size, source=source)

    def with_digest(self) -> Upload:
        """Return the same content under a name with its digest, so that the same file has the same name."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        name = PurePath(self.name)
        return replace(self, name=f"{name.stem}-{digest.hexdigest()[:12]}{name.suffix}")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request that uploads it."""
        return {"content-type": self.media_type, "content-length": str(self.size_bytes)}

    def chunks(self) -> Generator[bytes, None, None]:
        """Yield the content; a new iteration begins at its start."""
        if isinstance(self.source, bytes):
            for start in range(0, len(self.source), CHUNK_BYTES):
                yield self.source[start : start + CHUNK_BYTES]
            return
        with self.source.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    async def achunks(self) -> AsyncIterator[bytes]:
        """Yield what ``chunks`` yields; the file is read on threads."""
        chunks = self.chunks()
        try:
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                yield chunk
        finally:
            chunks.close()
