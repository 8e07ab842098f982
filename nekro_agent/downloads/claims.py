"""One download per target within one process, used where the SDK runs without a fleet."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from nekro_agent.errors import FencedError
from nekro_agent.ports import DownloadReport, DownloadStatus

__all__ = ["LocalDownloads"]

#: Most ended downloads that are remembered for waiting requests; the oldest are dropped.
_MOST_ENDED = 1000


class LocalDownloads:
    """``nekro_agent.ports.Downloads`` in memory; its claims never pass to another owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[Path, _Claim] = {}

    async def claim(self, target: Path, *, request: str) -> _Claim | None:
        """Claim the download to ``target``; None if another download holds the claim."""
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
        """Return the progress of the download to ``target``, or its end; None if there is none."""
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
        """Publish the progress."""
        self._done_bytes, self._whole_bytes = done_bytes, whole_bytes

    async def confirm(self) -> None:
        """Verify the claim."""
        if self.is_ended:
            raise FencedError("the download was ended")

    async def end(self, report: DownloadReport | None) -> None:
        """Release the claim."""
        self._report, self.is_ended = report, True

    def status(self) -> DownloadStatus:
        """Return the state that other downloads see."""
        return DownloadStatus(
            request=self.request,
            fence=self.fence,
            done_bytes=self._done_bytes,
            whole_bytes=self._whole_bytes,
            report=self._report,
        )
