"""Invalid servers and arguments of model downloads: each is a clear error, and nothing is left behind."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from range_server import RangeServer, Serve

from broker_config.settings import DatabaseSettings
from nekro.app.background import BackgroundLoop
from nekro.app.leases import LeaseKeeper
from nekro_agent.downloads.part import PartFile, PartState
from nekro_agent.errors import DownloadError, DownloadRefusedError, InvalidValueError
from nekro_agent.runtime import DownloadPolicy
from nekro_agent.testing import InMemoryRuntime
from plugin_pkgs import model_store
from storage.engine import Database
from storage.migrate import upgrade
from workers.jobs.downloads import DownloadSweep, SqlDownloads

CONTENT = bytes(range(256)) * (6 << 10)
POLICY = DownloadPolicy(allow_private=("127.0.0.0/8",), retry_seconds=0.01, tries=3, timeout_seconds=10)

Prepare = Callable[[RangeServer], None]


def refuses(status: int) -> Prepare:
    def prepare(server: RangeServer) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_error(status)

        server._answer = answer  # type: ignore[method-assign]

    return prepare


def redirects_inside(server: RangeServer) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "http://169.254.169.254/latest/meta-data")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server._answer = answer  # type: ignore[method-assign]


def sends_a_part(content_range: str) -> Prepare:
    def prepare(server: RangeServer) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(206)
            handler.send_header("Content-Range", content_range)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        server._answer = answer  # type: ignore[method-assign]

    return prepare


def ignores_ranges_and_cuts(server: RangeServer) -> None:
    server.behaviour.ignores_ranges = True
    server.behaviour.cut_after = 1 << 20


def changes_each_time(server: RangeServer) -> None:
    answer, count = server._answer, iter(range(99))
    server.behaviour.cut_after = 1 << 20

    def changing(handler: BaseHTTPRequestHandler) -> None:
        server.content = bytes([next(count)]) + CONTENT
        answer(handler)

    server._answer = changing  # type: ignore[method-assign]


def nothing(server: RangeServer) -> None:
    pass


async def download(server: RangeServer, directory: Path, *, name: str = "m", sha256: str = "") -> str | None:
    async with InMemoryRuntime(model_store.plugin, data_dir=directory, downloads=POLICY) as world:
        return (await world.call("download_model", server.url, name, sha256=sha256)).text


def left_in(directory: Path) -> list[str]:
    models = directory / "plugins" / "nekro.model_store" / "models"
    return sorted(path.name for path in models.iterdir()) if models.is_dir() else []


@pytest.mark.parametrize(
    ("prepare", "error", "reason"),
    [
        (refuses(404), DownloadError, r"model\.bin answered 404"),
        (refuses(403), DownloadError, r"model\.bin answered 403"),
        (refuses(503), DownloadError, r"model\.bin answered 503"),
        (redirects_inside, DownloadRefusedError, r"169\.254\.169\.254.*private, loopback and link-local"),
        (ignores_ranges_and_cuts, DownloadError, r"broke off after 1048576 bytes|ignores ranges"),
        (changes_each_time, DownloadError, "changes while it is fetched"),
        (sends_a_part("bytes 0-1/*, 2-3/4"), DownloadError, "without a valid Content-Range"),
        (sends_a_part(f"bytes 0-{'9' * 5_000}/*"), DownloadError, "without a valid Content-Range"),
    ],
)
async def test_faults_of_servers_are_reported_and_leave_nothing(
    serve: Serve, tmp_path: Path, prepare: Prepare, error: type[Exception], reason: str
) -> None:
    server = serve(CONTENT)
    prepare(server)
    with pytest.raises(error, match=reason):
        await download(server, tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"sha256": "0" * 64}, DownloadRefusedError, r"content has SHA-256 [0-9a-f]{64}, expected 0{64}"),
        ({"sha256": "md5"}, InvalidValueError, "is not a digest of 64 hexadecimal digits"),
        ({"name": "../../evil"}, ValueError, "model name"),
        ({"name": "a/b"}, ValueError, "model name"),
        ({"name": ".hidden"}, ValueError, "model name"),
        ({"name": ""}, ValueError, "model name"),
    ],
)
async def test_invalid_arguments_are_reported_and_leave_nothing(
    serve: Serve, tmp_path: Path, options: dict[str, str], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        await download(serve(CONTENT), tmp_path, **options)
    assert left_in(tmp_path) == [] and [path.name for path in tmp_path.iterdir()] in ([], ["plugins"])


async def test_a_directory_at_the_target_is_kept_and_named(serve: Serve, tmp_path: Path) -> None:
    target = tmp_path / "plugins" / "nekro.model_store" / "models" / "m.model"
    target.mkdir(parents=True)
    with pytest.raises(InvalidValueError, match=r"'m\.model' is a directory"):
        await download(serve(CONTENT), tmp_path)
    assert left_in(tmp_path) == ["m.model"] and list(target.iterdir()) == []


async def test_a_disk_that_fills_during_the_download_is_named_and_freed(
    serve: Serve, small_disk: Path
) -> None:
    server = serve(CONTENT)
    gate = server.behaviour.gate = threading.Event()
    server.behaviour.gate_at = 1 << 20
    filler = small_disk / "filler"

    def fill() -> None:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(64 << 10))

    fill_and_go = threading.Thread(target=lambda: (fill(), gate.set()))
    models = small_disk / "plugins" / "nekro.model_store" / "models"

    def progress_seen(handler: BaseHTTPRequestHandler) -> None:
        fill_and_go.start()
        answer(handler)

    answer, server._answer = server._answer, progress_seen  # type: ignore[method-assign]
    with pytest.raises(DownloadError, match=r"cannot write 'm\.model': the disk is full|the disk has \d+"):
        await download(server, small_disk)
    fill_and_go.join()
    assert sorted(path.name for path in models.iterdir()) == []


async def test_an_abandoned_unfinished_file_is_swept(tmp_path: Path) -> None:
    """No later download may use its directory, so the sweep finds it by its row."""
    settings = DatabaseSettings(url=f"sqlite:///{tmp_path / 'nekro.db'}")
    await upgrade(settings, tmp_path)
    database = Database(settings, tmp_path)
    background = BackgroundLoop(database)
    try:
        downloads = SqlDownloads(
            LeaseKeeper(database, background), background, data_dir=tmp_path, owner="w", lease_seconds=30
        )
        abandoned, running = tmp_path / "a" / "abandoned", tmp_path / "a" / "running"
        claims = [await downloads.claim(target, request="r") for target in (abandoned, running)]
        names = [model_part(target) for target in (abandoned, running)]
        assert claims[0] is not None and claims[1] is not None
        await claims[0].end(None)  # as a stopping worker ends it: another may resume
        sweep = DownloadSweep(database, data_dir=tmp_path, keep_seconds=1e-4)
        await sweep.sweep()
        assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(names[1])
        assert await downloads.status(abandoned) is None and await downloads.status(running) is not None
        await claims[1].end(None)
    finally:
        background.close()
        await database.dispose()


def state_of(part: PartFile, *, whole_bytes: int) -> PartState:
    return PartState(
        inode=part.inode,
        url="http://x/",
        sha256=None,
        validator="v",
        whole_bytes=whole_bytes,
        done=part.spans.copy(),
    )


def opened_part(target: Path) -> PartFile:
    part = PartFile(target)
    part.open()
    return part


def test_a_worker_that_lost_its_claim_describes_no_file_of_another(tmp_path: Path) -> None:
    late = opened_part(tmp_path / "m")
    late.write(0, b"a" * 100)
    heir = opened_part(tmp_path / "m")
    heir.write(50, b"a" * 50)
    with pytest.raises(DownloadError, match="replaced by another process"):
        late.save(state_of(late, whole_bytes=100))
    with pytest.raises(DownloadError, match="replaced by another process"):
        late.publish()
    late.close(keep=False)
    heir.save(state_of(heir, whole_bytes=100))
    heir.close(keep=True)
    state = PartFile(tmp_path / "m").open()
    assert state is not None and state.done == [(50, 100)]


def test_a_state_of_another_file_is_not_used(tmp_path: Path) -> None:
    late = opened_part(tmp_path / "m")
    late.write(0, b"a" * 100)
    late.save(state_of(late, whole_bytes=100))
    late.close(keep=True)
    (part,) = tmp_path.glob(".m.*.part")
    content = part.read_bytes()
    part.rename(tmp_path / "old")  # keeps the inode in use
    part.write_bytes(content[::-1])
    assert PartFile(tmp_path / "m").open() is None


def test_a_worker_that_lost_its_claim_writes_nothing_into_content_that_began_anew(tmp_path: Path) -> None:
    late = opened_part(tmp_path / "m")
    late.write(0, b"a" * 100)
    late.save(state_of(late, whole_bytes=100))
    heir = opened_part(tmp_path / "m")
    assert heir.spans.total == 100
    heir.restart()
    heir.write(0, b"b" * 100)
    late.write(0, b"a" * 100)
    heir.verify(hashlib.sha256(b"b" * 100).hexdigest(), "http://x/")
    heir.publish()
    assert (tmp_path / "m").read_bytes() == b"b" * 100


def model_part(target: Path) -> list[str]:
    """Create the files that an interrupted download leaves beside its target; returns their names."""
    before = set(target.parent.iterdir()) if target.parent.is_dir() else set()
    part = PartFile(target)
    part.open()
    part.write(0, CONTENT)
    part.save(state_of(part, whole_bytes=len(CONTENT) * 2))
    part.close(keep=True)
    return [path.name for path in set(target.parent.iterdir()) - before]
