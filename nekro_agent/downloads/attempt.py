"""One attempt to download: what is on disk is continued, and kept when the attempt is interrupted."""

from __future__ import annotations

import asyncio
from functools import partial

from nekro_agent.downloads.http import DownloadSource, Interrupted
from nekro_agent.downloads.order import DownloadOrder
from nekro_agent.downloads.part import PartFile, PartState, remove_stale
from nekro_agent.downloads.transfer import Content, Transfer
from nekro_agent.durations import STALE_SECONDS
from nekro_agent.errors import DownloadError, FencedError
from nekro_agent.files.names import plain_name, stated_name
from nekro_agent.ports import DownloadClaim, DownloadReport
from nekro_agent.tools.task_groups import in_thread

__all__ = ["attempt"]


async def attempt(order: DownloadOrder, claim: DownloadClaim) -> DownloadReport:
    """Download under a claim, and publish the file.

    Raises:
        DownloadError: it failed; what is on disk is kept for the next attempt if it can be used.
        FencedError: the claim passed to another worker, which continues with the partial file.
    """
    await in_thread(partial(remove_stale, order.place.parent, older_seconds=STALE_SECONDS))
    part = PartFile(order.place, area=order.area)
    state = await in_thread(part.open)
    keep = False
    transfer: Transfer | None = None
    try:
        if state is not None and not _fits(state, order):
            await in_thread(part.restart)
            state = None
        async with _source(order) as source:
            transfer = _transfer(order, claim, source, part, state)
            content = await transfer.run()
        await in_thread(part.verify, order.sha256, content.url)
        await claim.confirm()
        await in_thread(part.publish)
        return _report(part, content)
    except FencedError:
        keep = True  # the file now belongs to the other worker
        raise
    except (asyncio.CancelledError, DownloadError) as exc:
        if isinstance(exc, DownloadError) and claim.is_lost:
            keep = True
            raise FencedError(f"the download to {order.target.name!r} passed to another worker") from exc
        keep = await _saved(part, transfer, exc)
        raise
    finally:
        part.close(keep=keep)


async def _saved(part: PartFile, transfer: Transfer | None, exc: BaseException) -> bool:
    """Record what is on disk for the next attempt; False if it cannot be used."""
    is_passing = isinstance(exc, asyncio.CancelledError) or isinstance(exc.__cause__, Interrupted)
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


def _transfer(
    order: DownloadOrder,
    claim: DownloadClaim,
    source: DownloadSource,
    part: PartFile,
    state: PartState | None,
) -> Transfer:
    def on_progress(done_bytes: int, whole_bytes: int | None) -> None:
        if claim.is_lost:
            raise FencedError(f"the download to {order.target.name!r} passed to another worker")
        claim.progress(done_bytes, whole_bytes)
        order.progress(done_bytes, whole_bytes)

    return Transfer(
        source,
        part,
        policy=order.policy,
        max_bytes=order.max_bytes,
        sha256=order.sha256,
        state=state,
        on_progress=on_progress,
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
