"""The tour reports a point that fails; ``tests/security/test_security_private_files.py`` runs it."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from nekro_inside import run_inside
from waiting import WAIT_SECONDS

from broker_config.settings import Settings
from nekro.cli.commands.demo import load_demo
from nekro.cli.running import ExitCode

points, timeline = load_demo("points"), load_demo("timeline")
NOTHING = points.Evidence(
    messages=(),
    rounds=(),
    requests=(),
    tasks=(),
    pids={"long-1": 1},
    shared_files=frozenset(),
    pictures_shown=frozenset(),
    model_sha256="0" * 64,
    model_requests=0,
)


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.FAILED])
def test_a_temporary_directory_is_kept_only_if_a_point_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ExitCode
) -> None:
    async def play(settings: Settings, *_: Any) -> ExitCode:
        (settings.data_dir / "nekro.db").touch()
        return code

    monkeypatch.setattr("nekro.cli.commands.demo._play", play)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended, _, said = run_inside("demo", directory=tmp_path, environment={})
    assert ended == code
    kept = [str(path.parent) for path in tmp_path.rglob("nekro.db")]
    assert len(kept) == (code is not ExitCode.OK)
    assert all(path in said for path in kept)


def test_no_point_passes_when_nothing_happened() -> None:
    checked = points.check(NOTHING)
    assert [point.name for point in checked if point.ok] == []
    assert all(point.detail for point in checked)
    assert timeline.build(NOTHING) == []


def test_an_existing_file_alone_passes_no_point() -> None:
    evidence = dataclasses.replace(NOTHING, shared_files=frozenset({"plan.txt"}), model_requests=1)
    assert [point.name for point in points.check(evidence) if point.ok] == []


def test_a_chart_is_left_out_by_name_where_the_sandbox_has_no_packages() -> None:
    (left_out,) = [point for point in points.check(NOTHING) if point.is_left_out]
    assert left_out.detail == points.NO_PACKAGES
    evidence = dataclasses.replace(NOTHING, packages="pandas 3", figures={"figure-1.png": (0, 0)})
    (chart,) = [point for point in points.check(evidence) if point.name == left_out.name]
    assert not chart.ok and not chart.is_left_out


def test_the_model_server_serves_whole_files_and_ranges() -> None:
    with load_demo("stage").ModelServer(size_bytes=1000) as server:
        with urllib.request.urlopen(server.url, timeout=WAIT_SECONDS) as answer:
            whole = answer.read()
        request = urllib.request.Request(server.url, headers={"Range": "bytes=990-"})
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            assert (answer.status, answer.read()) == (206, whole[990:])
            assert answer.headers["Content-Range"] == "bytes 990-999/1000"
    assert hashlib.sha256(whole).hexdigest() == server.sha256
    assert server.requests == 2
