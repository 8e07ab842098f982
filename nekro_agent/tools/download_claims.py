"""One download per target within one process: what is used where no fleet is behind the SDK."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from nekro_agent.errors import FencedError
from nekro_agent.ports import DownloadReport, DownloadStatus

__all__ = ["LocalDownloads"]

#: Ended downloads that are remembered for those who waited; the oldest make room.
_MOST_ENDED = 1000


class LocalDownloads:
    """``nekro_agent.ports.Downloads`` in memory; its claims never pass to somebody else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[Path, _Claim] = {}

    async def claim(self, target: Path, *, request: str) -> _Claim | None:
        """Take the right to download to ``target``; None when somebody else has it."""
        with self._lock:
            known = self._claims.pop(target, None)
            if known is not None and not known.is_ended:
                self._claims[target] = known
                return None
            previous = None if known is None else known.status()
            claim = _Claim(request=request, fence=1 if known is None else known.fence + 1, previous=previous)
            self._claims[target] = claim
            ended = [path for path, other in self._claims.items() if other.is_ended]
            for path in ended[: max(0, len(ended) - _MOST_ENDED)]:
                del self._claims[path]
        return claim

    async def status(self, target: Path) -> DownloadStatus | None:
        """Return how far the download to ``target`` is, or how it ended."""
        with self._lock:
            claim = self._claims.get(target)
            return None if claim is None else claim.status()


@dataclass(kw_only=True)
class _Claim:
    request: str
    fence: int
    previous: DownloadStatus | None
    is_ended: bool = False
    is_lost: bool = False
    _done_bytes: int = 0
    _whole_bytes: int | None = None
    _report: DownloadReport | None = field(default=None)

    def progress(self, done_bytes: int, whole_bytes: int | None) -> None:
        """Let others see how far it is."""
        self._done_bytes, self._whole_bytes = done_bytes, whole_bytes

    async def confirm(self) -> None:
        """Check once more."""
        if self.is_ended:
            raise FencedError("the download was ended")

    async def end(self, report: DownloadReport | None) -> None:
        """Give the right back."""
        self._report, self.is_ended = report, True

    def status(self) -> DownloadStatus:
        """Return what others see."""
        return DownloadStatus(
            request=self.request,
            fence=self.fence,
            done_bytes=self._done_bytes,
            whole_bytes=self._whole_bytes,
            report=self._report,
        )
