"""Downloads: complete files or none, resumed after cuts and crashes, one per target in the whole fleet.

Where the SDK runs without a fleet, there is one per target within the process."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from nekro_agent import runtime
from nekro_agent.downloads.addresses import AddressPolicy, checked_url, login_of
from nekro_agent.downloads.order import DownloadOrder, Progress
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import DownloadError, DownloadRefusedError, FencedError, InvalidValueError
from nekro_agent.files import safe_files, staging, uploads
from nekro_agent.files.areas import shared_place
from nekro_agent.ports import DownloadClaim, DownloadParts, DownloadReport, Downloads, DownloadStatus
from nekro_agent.runtime import DownloadPolicy

__all__ = [
    "Download",
    "LocalDownloads",
    "Progress",
    "fetch",
]


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
    parts: DownloadParts | None = None
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


_SHA256 = re.compile(r"[0-9a-fA-F]{64}")

_LONGEST_NAME_BYTES: Final = 255


#: Used where no runtime offers claims of a fleet.
_local = LocalDownloads()


@dataclass(frozen=True, kw_only=True)
class Download:
    """A finished download."""

    path: Path
    size_bytes: int
    sha256: str
    content_type: str | None
    #: URL of the content, after redirects.
    url: str
    #: Name that the server states for the file, without directories; None if it states none.
    file_name: str | None = None


async def fetch(
    url: str,
    dest: Path | str,
    *,
    sha256: str | None = None,
    max_bytes: int | None = None,
    timeout_seconds: float | None = None,
    allow_private: Iterable[str] | None = None,
    headers: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Download:
    """Download ``url`` to the file ``dest``, which appears complete or not at all.

    A broken connection is resumed where it broke; so is a download whose process died, at the next
    request for it. While another worker downloads to the same ``dest``, this one waits: it reports the
    other's progress and, if both requests are the same, shares the result.

    A log-in in the URL (``https://user:password@host/…``) is sent as basic authentication, to its server.

    Args:
        dest: a file path; its directory is created, an existing file is replaced at the end. In a
            call, a text must be in a directory of this chat, plugin or call, because it may come
            from a model.
        sha256: expected digest as hexadecimal text; None accepts any content.
        max_bytes: largest content; None means the configured limit, which it can only lower.
        timeout_seconds: longest time without data from the server; None means the configured one.
        allow_private: hosts and networks that may be reached although private; None means
            the configured ones.

    Raises:
        DownloadRefusedError: scheme, address, size or digest is not acceptable.
        DownloadError: the server could not be reached, refused, or broke off too often; or the
            file cannot be written.
        UploadQuotaError: ``dest`` is in a chat's uploads, which have no space for it.
        InvalidValueError: ``dest`` is a directory, an invalid file name or a text that names another
            place, ``sha256`` is not a digest, or a link leads out of a shared area.
    """
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise InvalidValueError(f"sha256={sha256!r} is not a digest of 64 hexadecimal digits")
    policy = runtime.current().downloads if runtime.is_bound() else DownloadPolicy()
    address, _ = checked_url(url)
    target = _checked_target(dest)
    most = policy.max_bytes if max_bytes is None else min(max_bytes, policy.max_bytes)
    with _place_of(target) as place:
        area = uploads.area_of(target) if place == target else None
        order = DownloadOrder(
            url=address,
            target=target,
            place=place,
            sha256=sha256.lower() if sha256 else None,
            max_bytes=most,
            area=None if area is None else uploads.UploadArea(area),
            headers=_with_login(headers or {}, login_of(url)),
            progress=progress or _ignore,
            addresses=AddressPolicy(policy.allow_private if allow_private is None else allow_private),
            policy=policy if timeout_seconds is None else replace(policy, timeout_seconds=timeout_seconds),
        )
        return await _alone(order, _claims())


async def _alone(order: DownloadOrder, claims: Downloads) -> Download:
    """Download if no other worker does; otherwise wait and share its result."""
    waits_since: int | None = None
    while True:
        claim = await claims.claim(order.target, request=order.request)
        status = await claims.status(order.target) if claim is None else claim.previous
        ended = None if waits_since is None else _ended(order, status, since=waits_since)
        report = ended if ended is not None and _is_here(order, ended) else None
        if claim is not None and report is None:
            try:
                return await _claimed(order, claim, known=ended)
            except FencedError:
                # This process was suspended so long that another one took over, and may have ended since.
                waits_since = claim.fence if waits_since is None else waits_since
                continue
        if claim is not None:
            await claim.end(report)
        if report is not None:
            return _result(order, report)
        if status is not None:
            waits_since = status.fence if waits_since is None else waits_since
            order.progress(status.done_bytes, status.whole_bytes)
        await asyncio.sleep(REFRESH_SECONDS)


def _ended(order: DownloadOrder, status: DownloadStatus | None, *, since: int) -> DownloadReport | None:
    """Return how a download ended during the wait, if it was for the same request; else None."""
    if status is None or status.report is None or status.fence < since or status.request != order.request:
        return None
    return status.report


def _is_here(order: DownloadOrder, report: DownloadReport) -> bool:
    """Whether a report is valid on this host, which may share no disk with the one that downloaded."""
    is_there = order.place.is_file() and order.place.stat().st_size == report.size_bytes
    return is_there or report.error is not None


async def _claimed(
    order: DownloadOrder, claim: DownloadClaim, *, known: DownloadReport | None = None
) -> Download:
    """Download under a claim, which is released with the result.

    Args:
        known: how the same request has just ended, on another host or with a file that is gone.

    Raises:
        FencedError: the claim passed to another worker, which continues with the partial file.
    """
    report: DownloadReport | None = None
    try:
        # Imported here: it takes 25 ms, for an HTTP client, and each worker imports this module.
        from nekro_agent.downloads.attempt import attempt

        report = await attempt(order, claim, known=known)
        return _result(order, report)
    except DownloadError as exc:
        report = DownloadReport(error=str(exc), retryable=exc.retryable)
        raise
    finally:
        await claim.end(report)


def _result(order: DownloadOrder, report: DownloadReport) -> Download:
    """Convert a report to the return value or the exception of ``fetch``."""
    if report.error is not None:
        raise (DownloadError if report.retryable else DownloadRefusedError)(report.error)
    return Download(
        path=order.target,
        size_bytes=report.size_bytes,
        sha256=report.sha256,
        content_type=report.content_type,
        url=report.final_url,
        file_name=report.file_name,
    )


def _with_login(headers: Mapping[str, str], login: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request; an ``Authorization`` of the caller goes before the URL's log-in."""
    is_given = any(name.lower() == "authorization" for name in headers)
    return dict(headers) if is_given else {**headers, **login}


def _checked_target(dest: Path | str) -> Path:
    if "\0" in str(dest):
        raise InvalidValueError(f"download target {str(dest)!r} contains a zero character")
    files = staging.files_of_call()
    if isinstance(dest, str) and files is not None:
        files.require_target(dest)
    target = Path(dest).absolute()
    if len(os.fsencode(target.name)) > _LONGEST_NAME_BYTES:
        raise InvalidValueError(f"download target {target.name[:100]!r}… is too long for a file name")
    if target.is_dir():
        raise InvalidValueError(f"download target {target.name!r} is a directory; name a file in it")
    return target


@contextmanager
def _place_of(target: Path) -> Iterator[Path]:
    """Yield the path of the target; in a shared area by a descriptor of its directory, which is created.

    Raises:
        DownloadError: the directory cannot be created.
        InvalidValueError: a link leads to it.
    """
    found = shared_place(target)
    with ExitStack() as stack:
        if found is None:
            yield target
            return
        try:
            parent_fd, name = stack.enter_context(safe_files.parent_of(*found))
        except OSError as exc:
            raise DownloadError(f"cannot write {target.name!r}: {exc.strerror}") from exc
        yield Path(f"/proc/self/fd/{parent_fd}") / name


def _claims() -> Downloads:
    claims = runtime.current().download_claims if runtime.is_bound() else None
    return _local if claims is None else claims


def _ignore(done_bytes: int, whole_bytes: int | None) -> None:
    """Do nothing: the caller did not pass a progress callback."""
