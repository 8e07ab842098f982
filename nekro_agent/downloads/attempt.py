"""One attempt to download: what is on disk is continued, and kept when the attempt is interrupted."""

from __future__ import annotations

import asyncio
from functools import partial

from nekro_agent.downloads.http import DownloadSource, Interrupted
from nekro_agent.downloads.order import DownloadOrder, Progress
from nekro_agent.downloads.part import PartFile, PartState, remove_stale
from nekro_agent.downloads.stored import PartStoring
from nekro_agent.downloads.transfer import Content, Transfer
from nekro_agent.durations import STALE_SECONDS
from nekro_agent.errors import DownloadError, FencedError, StorageError
from nekro_agent.files.names import plain_name, stated_name
from nekro_agent.ports import DownloadClaim, DownloadReport
from nekro_agent.tools.task_groups import in_thread

__all__ = ["attempt"]


async def attempt(
    order: DownloadOrder, claim: DownloadClaim, *, known: DownloadReport | None = None
) -> DownloadReport:
    """Download under a claim, and publish the file.

    Args:
        known: how another host just ended the same request; its content is taken from the store.

    Raises:
        DownloadError: it failed; what is on disk is kept for the next attempt if it can be used.
        FencedError: the claim passed to another worker, which continues with the partial file.
    """
    await in_thread(partial(remove_stale, order.place.parent, older_seconds=STALE_SECONDS))
    part = PartFile(order.place, area=order.area)
    state = await in_thread(part.open)
    keep = False
    transfer: Transfer | None = None
    storing = None if claim.parts is None else PartStoring(claim.parts, part, order)
    try:
        if state is not None and not _fits(state, order):
            await in_thread(part.restart)
            state = None
        on_progress = _progress(order, claim)
        if storing is not None:
            sha256 = order.sha256 if known is None else known.sha256
            state = await storing.restore(state, sha256=sha256, on_progress=on_progress)
        async with _source(order) as source:
            transfer = _transfer(order, source, part, state, on_progress, storing)
            content = await transfer.run()
        await in_thread(part.verify, order.sha256, content.url)
        await claim.confirm()
        if storing is not None:
            await storing.finish(part.hexdigest)
        await in_thread(part.publish)
        keep = True
        return _report(part, content) if known is None or known.sha256 != part.hexdigest else known
    except FencedError:
        keep = True  # the file now belongs to the other worker
        raise
    except (asyncio.CancelledError, DownloadError) as exc:
        if isinstance(exc, DownloadError) and claim.is_lost:
            keep = True
            raise FencedError(f"the download to {order.target.name!r} passed to another worker") from exc
        keep = await _saved(part, transfer, exc)
        raise
    except StorageError as exc:
        keep = await _saved(part, transfer, exc)
        raise DownloadError(f"cannot keep {order.target.name!r} in the files' store: {exc}") from exc
    finally:
        if storing is not None:
            await storing.close(keep=keep)
        part.close(keep=keep)


async def _saved(part: PartFile, transfer: Transfer | None, exc: BaseException) -> bool:
    """Record what is on disk for the next attempt; False if it cannot be used."""
    is_passing = isinstance(exc, asyncio.CancelledError | StorageError)
    is_passing = is_passing or isinstance(exc.__cause__, Interrupted)
    state = transfer.state if transfer is not None and is_passing else None
    if state is None:
        return False
    try:
        await in_thread(part.save, state)
    except DownloadError:
        return False
    return True


def _source(order: DownloadOrder) -> DownloadSource:
    return DownloadSource(
        order.url,
        addresses=order.addresses,
        silence_seconds=order.policy.timeout_seconds,
        connections=max(1, order.policy.connections),
        headers=order.headers,
    )


def _progress(order: DownloadOrder, claim: DownloadClaim) -> Progress:
    def on_progress(done_bytes: int, whole_bytes: int | None) -> None:
        if claim.is_lost:
            raise FencedError(f"the download to {order.target.name!r} passed to another worker")
        claim.progress(done_bytes, whole_bytes)
        order.progress(done_bytes, whole_bytes)

    return on_progress


def _transfer(
    order: DownloadOrder,
    source: DownloadSource,
    part: PartFile,
    state: PartState | None,
    on_progress: Progress,
    storing: PartStoring | None,
) -> Transfer:
    return Transfer(
        source,
        part,
        policy=order.policy,
        max_bytes=order.max_bytes,
        sha256=order.sha256,
        state=state,
        on_progress=on_progress,
        on_written=None if storing is None else storing.grown,
        alignment=None if storing is None else storing.alignment,
    )


def _fits(state: PartState, order: DownloadOrder) -> bool:
    """Whether what is on disk is the beginning of the requested content."""
    return (
        state.url == order.url
        and state.whole_bytes <= order.max_bytes
        and (state.sha256 == order.sha256 or (state.sha256 is None and state.validator is not None))
    )


def _report(part: PartFile, content: Content) -> DownloadReport:
    return DownloadReport(
        size_bytes=part.spans.total,
        sha256=part.hexdigest,
        content_type=content.content_type,
        final_url=content.url,
        file_name=plain_name(stated_name(content.disposition)) if content.disposition else None,
    )
