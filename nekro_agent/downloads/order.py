"""What is to be downloaded, for an attempt and for those that wait for one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nekro_agent.downloads.addresses import AddressPolicy
from nekro_agent.files import uploads
from nekro_agent.runtime import DownloadPolicy

__all__ = ["DownloadOrder", "Progress"]

#: Called with the bytes received so far and the whole size, which is None while it is unknown.
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class DownloadOrder:
    """The arguments of ``fetch`` with the limits that apply."""

    url: str
    target: Path
    #: The same file, by a path that no link can lead elsewhere.
    place: Path
    sha256: str | None
    max_bytes: int
    headers: Mapping[str, str]
    progress: Progress
    addresses: AddressPolicy
    policy: DownloadPolicy
    #: Uploads whose quota applies to the file; None outside of uploads.
    area: uploads.UploadArea | None = None

    @property
    def request(self) -> str:
        """Key of everything that determines the result: equal requests may share a result."""
        parts = (self.url, self.sha256, self.max_bytes, sorted(self.headers.items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()
