"""The tour passes its points, and reports a point that fails."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import urllib.request

from waiting import WAIT_SECONDS

from cli.demo import points, scenes, timeline
from cli.demo.evidence import Evidence
from cli.demo.model_server import ModelServer

NOTHING = Evidence(
    messages=(),
    rounds=(),
    requests=(),
    tasks=(),
    pids={"long-1": 1},
    shared_files=frozenset(),
    model_sha256="0" * 64,
    model_requests=0,
)


def test_the_tour_passes_every_point() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cli.main", "demo", "--json"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    value = json.loads(done.stdout)
    assert [point["name"] for point in value["points"] if not point["ok"]] == []
    assert len(value["points"]) == 10
    assert len({entry["process"] for entry in value["timeline"] if entry["process"]}) >= 5
    assert any(scenes.GREETING in entry["what"] for entry in value["timeline"])


def test_no_point_passes_when_nothing_happened() -> None:
    checked = points.check(NOTHING)
    assert [point.name for point in checked if point.ok] == []
    assert all(point.detail for point in checked)
    assert timeline.build(NOTHING) == []


def test_an_existing_file_alone_passes_no_point() -> None:
    evidence = dataclasses.replace(NOTHING, shared_files=frozenset({"plan.txt"}), model_requests=1)
    assert [point.name for point in points.check(evidence) if point.ok] == []


def test_the_model_server_serves_whole_files_and_ranges() -> None:
    with ModelServer(size_bytes=1000) as server:
        with urllib.request.urlopen(server.url, timeout=WAIT_SECONDS) as answer:
            whole = answer.read()
        request = urllib.request.Request(server.url, headers={"Range": "bytes=990-"})
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            assert (answer.status, answer.read()) == (206, whole[990:])
            assert answer.headers["Content-Range"] == "bytes 990-999/1000"
    assert hashlib.sha256(whole).hexdigest() == server.sha256
    assert server.requests == 2
