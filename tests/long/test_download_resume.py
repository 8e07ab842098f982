"""Interrupted, changed and concurrent downloads: resumed or refused, and nothing is left behind."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from range_server import RangeServer, Serve
from waiting import WAIT_SECONDS

from nekro_agent import runtime
from nekro_agent.downloads.download import Download, fetch
from nekro_agent.downloads.part import Spans, remove_stale
from nekro_agent.errors import DownloadError, DownloadRefusedError, InvalidValueError
from nekro_agent.runtime import DownloadPolicy
from nekro_agent.testing import InMemoryRuntime

CONTENT = hashlib.shake_256(b"a model").digest((3 << 20) + 12_345)
BIG = hashlib.shake_256(b"a big model").digest(24 << 20)
POLICY = DownloadPolicy(
    allow_private=("127.0.0.0/8",),
    timeout_seconds=10,
    retry_seconds=0.01,
    tries=3,
    connections=4,
    parallel_min_bytes=16 << 20,
)


@pytest.fixture(autouse=True)
def bound(tmp_path: Path) -> Iterator[None]:
    world = InMemoryRuntime(data_dir=tmp_path / "data", downloads=POLICY)
    with runtime.bound(world.runtime):
        yield


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def is_whole(result: Download, server: RangeServer) -> bool:
    on_disk = hashlib.sha256(result.path.read_bytes()).hexdigest()
    return result.sha256 == on_disk == server.sha256 and result.size_bytes == len(server.content)


async def stopped_half_way(server: RangeServer, target: Path, **options: Any) -> None:
    """Start a download and cancel it when more than half is on disk."""
    behaviour = server.behaviour
    behaviour.gate, behaviour.gate_at = threading.Event(), len(server.content) * 2 // 3
    half = asyncio.Event()

    def progress(done: int, whole: int | None) -> None:
        if whole is not None and done > whole / 2:
            half.set()

    task = asyncio.create_task(fetch(server.url, target, progress=progress, **options))
    await asyncio.wait_for(half.wait(), WAIT_SECONDS)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    behaviour.gate.set()
    behaviour.gate = None


async def test_after_a_cut_only_the_rest_is_requested(serve: Serve, tmp_path: Path) -> None:
    server = serve(CONTENT)
    server.behaviour.cut_after = 1 << 20
    result = await fetch(server.url, tmp_path / "m", sha256=server.sha256)
    assert is_whole(result, server)
    assert server.starts == [0, 1 << 20, 2 << 20, 3 << 20]
    assert [request.headers.get("if-range") for request in server.requests] == [
        None,
        *[f'"{server.sha256[:16]}"'] * 3,
    ]
    assert server.sent_bytes == len(CONTENT)
    assert files(tmp_path) == ["m"]


async def test_a_cancelled_download_is_resumed(serve: Serve, tmp_path: Path) -> None:
    server = serve(CONTENT)
    await stopped_half_way(server, tmp_path / "m")
    assert len(files(tmp_path)) == 2 and "m" not in files(tmp_path)
    result = await fetch(server.url, tmp_path / "m")
    assert is_whole(result, server)
    assert server.starts[0] == 0 and len(server.starts) == 2 and server.starts[1] > len(CONTENT) // 2
    assert files(tmp_path) == ["m"]


async def test_a_file_that_changed_meanwhile_is_downloaded_again(serve: Serve, tmp_path: Path) -> None:
    server = serve(CONTENT)
    await stopped_half_way(server, tmp_path / "m")
    server.content = CONTENT[::-1]
    result = await fetch(server.url, tmp_path / "m")
    assert is_whole(result, server)
    assert files(tmp_path) == ["m"]
    await stopped_half_way(server, tmp_path / "n")
    server.content = CONTENT[: 1 << 20]  # shorter than the part on disk
    assert is_whole(await fetch(server.url, tmp_path / "n"), server)
    assert files(tmp_path) == ["m", "n"]


async def test_a_file_that_changed_is_downloaded_again_although_its_beginning_is_missing(
    serve: Serve, tmp_path: Path
) -> None:
    server, target = serve(BIG), tmp_path / "m"
    later_parts, released, send = asyncio.Event(), threading.Event(), server._send

    def late_beginning(handler: Any, content: Any, start: int, end: int) -> None:
        if start == 0:
            released.wait(WAIT_SECONDS)
        send(handler, content, start, end)

    server._send = late_beginning  # type: ignore[method-assign]

    def progress(done: int, whole: int | None) -> None:
        if done > 8 << 20:
            later_parts.set()

    task = asyncio.create_task(fetch(server.url, target, progress=progress))
    await asyncio.wait_for(later_parts.wait(), WAIT_SECONDS)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    released.set()
    server.content = BIG[::-1]
    assert is_whole(await fetch(server.url, target), server)
    assert files(tmp_path) == ["m"]


async def test_a_file_that_changes_on_every_request_is_an_error_and_leaves_nothing(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(CONTENT)
    server.behaviour.cut_after = 1 << 20
    answer = server._answer

    def changing(handler: Any) -> None:
        server.content = os.urandom(16) + CONTENT
        answer(handler)

    server._answer = changing  # type: ignore[method-assign]
    with pytest.raises(DownloadError, match="changes while it is fetched"):
        await fetch(server.url, tmp_path / "m")
    assert files(tmp_path) == []


async def test_from_a_server_without_ranges_the_whole_file_is_requested(serve: Serve, tmp_path: Path) -> None:
    server = serve(CONTENT)
    server.behaviour.ignores_ranges = True
    server.behaviour.cut_after, server.behaviour.cuts_left = 2 << 20, 1
    assert is_whole(await fetch(server.url, tmp_path / "m"), server)
    server.behaviour.cuts_left = None
    with pytest.raises(DownloadError, match=r"broke off after 2097152 bytes|ignores ranges"):
        await fetch(server.url, tmp_path / "n")
    assert files(tmp_path) == ["m"]


async def test_a_digest_permits_resuming_without_a_validator(serve: Serve, tmp_path: Path) -> None:
    server = serve(CONTENT)
    server.behaviour.has_validator = False
    server.behaviour.cut_after, server.behaviour.cuts_left = 1 << 20, 1
    assert is_whole(await fetch(server.url, tmp_path / "m"), server)
    assert server.starts == [0, 0]
    server.requests.clear()
    server.behaviour.cuts_left = 1
    assert is_whole(await fetch(server.url, tmp_path / "m", sha256=server.sha256), server)
    assert server.starts == [0, 1 << 20]


async def test_large_files_are_downloaded_over_several_connections(serve: Serve, tmp_path: Path) -> None:
    server = serve(BIG)
    server.behaviour.cut_after = 5 << 20
    seen: list[int] = []
    result = await fetch(server.url, tmp_path / "m", progress=lambda done, whole: seen.append(done))
    assert is_whole(result, server)
    assert len({request.start for request in server.requests}) >= 6
    assert seen == sorted(seen) and seen[-1] == len(BIG)
    assert server.starts.count(0) == 1
    assert files(tmp_path) == ["m"]


async def test_a_download_over_several_connections_resumes_with_its_gaps(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(BIG)
    await stopped_half_way(server, tmp_path / "m")
    server.count_anew()
    seen: list[int] = []
    result = await fetch(server.url, tmp_path / "m", progress=lambda done, _: seen.append(done))
    assert is_whole(result, server)
    # The server's count would include bytes in buffers of closed connections.
    assert 0 not in server.starts and seen[0] > len(BIG) // 2
    assert all(request.end is not None for request in server.requests), "it closes no unfinished answer"


async def test_small_files_and_servers_without_ranges_get_one_connection(
    serve: Serve, tmp_path: Path
) -> None:
    small, plain = serve(CONTENT), serve(BIG)
    plain.behaviour.ignores_ranges = True
    for server in (small, plain):
        assert is_whole(await fetch(server.url, tmp_path / "m"), server)
        assert len(server.requests) == 1


async def test_concurrent_requests_of_one_file_cause_one_download(serve: Serve, tmp_path: Path) -> None:
    server, callers = serve(CONTENT), range(20)
    behaviour, informed = server.behaviour, set[int]()
    behaviour.gate = gate = threading.Event()
    behaviour.gate_at = 2 << 20

    def seen_by(caller: int) -> Callable[[int, int | None], None]:
        def progress(done: int, _: int | None) -> None:
            if done > 0:
                informed.add(caller)
            if len(informed) == len(callers):
                gate.set()  # waiting callers saw the progress

        return progress

    fetches = [fetch(server.url, tmp_path / "m", progress=seen_by(caller)) for caller in callers]
    results = await asyncio.gather(*fetches)
    assert len(server.requests) == 1
    assert all(is_whole(result, server) for result in results)


async def test_waiting_callers_share_a_failure_only_for_the_same_request(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(CONTENT)
    server.behaviour.pause_seconds = 0.002
    wrong = [fetch(server.url, tmp_path / "m", sha256="0" * 64) for _ in range(3)]
    outcomes = await asyncio.gather(*wrong, fetch(server.url, tmp_path / "m"), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DownloadRefusedError] * 3 + [Download]
    # The two that wait share the failure, unless the other request is served between them.
    assert len(server.requests) in (2, 3)
    assert files(tmp_path) == ["m"]


async def test_a_waiting_caller_continues_when_the_first_is_cancelled(serve: Serve, tmp_path: Path) -> None:
    server = serve(CONTENT)
    behaviour = server.behaviour
    behaviour.gate, behaviour.gate_at = threading.Event(), 2 << 20
    half, waits = asyncio.Event(), asyncio.Event()

    def progress(done: int, whole: int | None) -> None:
        if done >= 1 << 20:
            half.set()

    first = asyncio.create_task(fetch(server.url, tmp_path / "m", progress=progress))
    await asyncio.wait_for(half.wait(), WAIT_SECONDS)
    second = asyncio.create_task(fetch(server.url, tmp_path / "m", progress=lambda done, _: waits.set()))
    await asyncio.wait_for(waits.wait(), WAIT_SECONDS)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    behaviour.gate.set()
    assert is_whole(await second, server)
    assert server.starts[0] == 0 and len(server.starts) == 2 and server.starts[1] >= 1 << 20


async def test_a_wrong_digest_after_a_resume_leaves_nothing(serve: Serve, tmp_path: Path) -> None:
    server = serve(CONTENT)
    await stopped_half_way(server, tmp_path / "m", sha256="0" * 64)
    with pytest.raises(DownloadRefusedError, match=r"content has SHA-256 .*, expected 0{64}"):
        await fetch(server.url, tmp_path / "m", sha256="0" * 64)
    assert files(tmp_path) == []


async def test_partial_data_of_another_request_is_not_used(serve: Serve, tmp_path: Path) -> None:
    one, other = serve(CONTENT), serve(CONTENT[::-1])
    await stopped_half_way(one, tmp_path / "m")
    assert is_whole(await fetch(other.url, tmp_path / "m"), other)
    assert files(tmp_path) == ["m"]


@pytest.mark.parametrize("damage", ["{", "", '{"version": 2}', None])
async def test_a_damaged_resume_record_is_ignored(serve: Serve, tmp_path: Path, damage: str | None) -> None:
    server = serve(CONTENT)
    await stopped_half_way(server, tmp_path / "m")
    (notes,) = tmp_path.glob(".*.json")
    if damage is None:
        notes.with_name(notes.name.removesuffix(".json")).write_bytes(b"short")
    else:
        notes.write_text(damage)
    assert is_whole(await fetch(server.url, tmp_path / "m"), server)
    assert files(tmp_path) == ["m"]


async def test_a_planted_link_is_not_written_through(serve: Serve, tmp_path: Path) -> None:
    server = serve(CONTENT)
    await stopped_half_way(server, tmp_path / "m")
    (part,) = tmp_path.glob(".*.part")
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(len(CONTENT)))
    for plant in (os.symlink, os.link):
        part.unlink(missing_ok=True)
        plant(precious, part)
        await stopped_half_way(server, tmp_path / "m")
    assert precious.read_bytes() == bytes(len(CONTENT))


async def test_a_full_disk_is_named_and_freed(serve: Serve, small_disk: Path, tmp_path: Path) -> None:
    server = serve(BIG)
    with pytest.raises(
        DownloadError, match=r"cannot write 'm': 25165824 bytes remain to be written, the disk has \d+"
    ):
        await fetch(server.url, small_disk / "m")
    server.behaviour.has_validator = False
    silent = serve(BIG)

    def unannounced(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        with suppress(OSError):
            handler.wfile.write(BIG)

    silent._answer = unannounced  # type: ignore[method-assign]
    with pytest.raises(DownloadError, match="cannot write 'm': the disk is full"):
        await fetch(silent.url, small_disk / "m")
    assert files(small_disk) == []


async def test_invalid_targets_and_addresses_are_refused_by_name(serve: Serve, tmp_path: Path) -> None:
    server = serve(CONTENT)
    targets: list[tuple[Path | str, str]] = [
        (tmp_path, "is a directory"),
        (tmp_path / ("n" * 256), "is too long for a file name"),
        (f"{tmp_path}/a\0b", "zero character"),
    ]
    for target, reason in targets:
        with pytest.raises(InvalidValueError, match=reason):
            await fetch(server.url, target)
    with pytest.raises(DownloadRefusedError, match="private, loopback and link-local"):
        await fetch(server.url, tmp_path / "m", allow_private=())
    assert server.requests == [] and files(tmp_path) == []
    long = tmp_path / ("ü" * 120)
    assert is_whole(await fetch(server.url, long), server)


async def test_unfinished_files_are_deleted_after_their_retention_time(tmp_path: Path) -> None:
    old, young = tmp_path / ".m.0123456789ab.part", tmp_path / ".n.0123456789ab.part.json"
    other = tmp_path / ".m.part"
    for path in (old, young, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 100, time.time() - 100))
    assert remove_stale(tmp_path, older_seconds=50) == 1
    assert files(tmp_path) == sorted([young.name, other.name])


def test_spans_distinguish_present_and_missing_ranges() -> None:
    spans = Spans([(10, 20), (0, 5), (30, 40)])
    assert (spans.total, spans.prefix) == (25, 5)
    assert spans.missing(50) == [(5, 10), (20, 30), (40, 50)]
    spans.add(5, 10)
    spans.add(18, 32)
    assert spans.copy() == [(0, 40)] and spans.missing(40) == []
    spans.add(7, 7)
    assert spans.missing(35) == []
