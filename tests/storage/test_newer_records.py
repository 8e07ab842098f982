"""Stored JSON of a newer release, which other workers or commands of an update still write, is read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from nekro.app.background import BackgroundLoop
from nekro.app.leases import LeaseKeeper
from nekro.cli.services.ownership import Ownership, WorkerEntry, read_running
from nekro.sandbox.packages.layers import LayerPublisher, parse_requirement
from nekro_agent.ports import DownloadReport
from storage.engine import Database
from storage.repositories.plugin_states import Activation
from storage.tables import PLUGIN_VALUES
from workers.jobs.downloads import SqlDownloads


def add_field(path: Path, change: Any) -> None:
    """Write a JSON file again, changed as a newer release would write it."""
    stored = json.loads(path.read_text("utf-8"))
    change(stored)
    path.write_text(json.dumps(stored), "utf-8")


async def test_the_report_of_a_download(database: Database, tmp_path: Path) -> None:
    async with database.begin() as tx:
        granted = await tx.downloads.claim("a/b", request="r", owner="w", lease_seconds=30)
        assert granted is not None
        report = {"size_bytes": 9, "sha256": "ab", "mirror": "https://mirror.example"}
        await tx.downloads.end("a/b", fence=granted[0], report=report)
    background = BackgroundLoop(database)
    try:
        downloads = SqlDownloads(
            LeaseKeeper(database, background), background, data_dir=tmp_path, owner="w", lease_seconds=30
        )
        status = await downloads.status(tmp_path / "a" / "b")
    finally:
        await asyncio.to_thread(background.close)
    assert status is not None and status.report == DownloadReport(size_bytes=9, sha256="ab")


async def test_the_activations_of_a_chat(database: Database) -> None:
    async with database.begin() as tx:
        await tx.activations.replace("chat", {"a.b": Activation(after=3, turns=None)})
        stored = {"a.b": {"after": 3, "turns": 2, "reason": "asked"}}
        await tx.connection.execute(PLUGIN_VALUES.update().values(value=json.dumps(stored)))
        assert await tx.activations.of_chat("chat") == {"a.b": Activation(after=3, turns=2)}


def test_the_record_of_a_running_system(tmp_path: Path) -> None:
    owner = Ownership(tmp_path)
    assert owner.claim()
    try:
        workers = (WorkerEntry(name="methods-1", lane="methods", pid=1),)
        owner.publish(command="up", workers=workers)
        running = read_running(tmp_path)

        def change(stored: dict[str, Any]) -> None:
            stored["release"] = "9"
            stored["workers"][0]["host"] = "h"

        add_field(tmp_path / "run" / "up.json", change)
        assert running == read_running(tmp_path) and running is not None and running.workers == workers
    finally:
        owner.release()


def test_the_record_of_a_package_layer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "pkg.py").write_text("x = 1")
    store, requirement = LayerPublisher(tmp_path / "layers"), parse_requirement("pkg")
    built = store.publish(source, requirement, version="1", wheels={}, most_bytes=1000)
    (record,) = (tmp_path / "layers" / "built").iterdir()
    add_field(record, lambda stored: stored.update(signed_by="index"))
    assert store.find(requirement) == built
