"""Download a file as a host with a disk of its own, which shares a database and a store with others.

``python -m benchmarks.harness.downloading_host DATABASE STORE ROOT URL [--target PATH] [--sha256 DIGEST]
[--connections N]`` prints ``progress BYTES`` lines, and at the end a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

from broker_config.settings import DatabaseSettings
from nekro.app.background import BackgroundLoop
from nekro.app.leases import LeaseKeeper
from nekro_agent import runtime
from nekro_agent.downloads.download import fetch
from nekro_agent.runtime import DownloadPolicy
from nekro_agent.testing import InMemoryRuntime
from storage.engine import Database
from storage.files.host_files import HostFiles
from storage.files.stores.opening import open_store
from workers.jobs.downloads import SqlDownloads

__all__ = ["main"]


async def download(options: argparse.Namespace) -> dict[str, Any]:
    """Download to a path below the root; returns what was received and the use of memory."""
    root: Path = options.root
    database = Database(DatabaseSettings(url=options.database), root)
    background = BackgroundLoop(database)
    files = HostFiles(database, open_store(options.store), root=root / "files", cache_bytes=1 << 30)
    claims = SqlDownloads(
        LeaseKeeper(database, background),
        background,
        data_dir=root,
        owner=f"host:{os.getpid()}",
        lease_seconds=options.lease_seconds,
        files=lambda: files,
    )
    policy = DownloadPolicy(allow_private=("127.0.0.0/8",), connections=options.connections)
    shown = -1

    def progress(done: int, whole: int | None) -> None:
        nonlocal shown
        if done >> 20 != shown:
            shown = done >> 20
            print(f"progress {done}", flush=True)

    try:
        world = InMemoryRuntime(data_dir=root, downloads=policy)
        with runtime.bound(replace(world.runtime, download_claims=claims)):
            result = await fetch(options.url, root / options.target, sha256=options.sha256, progress=progress)
    finally:
        background.close()
        await database.dispose()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "sha256": result.sha256,
        "bytes": result.size_bytes,
        "content_type": result.content_type,
        "most_memory": used.ru_maxrss << 10,
        "cpu_seconds": used.ru_utime + used.ru_stime,
    }


def main() -> None:
    """Download once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("database")
    parser.add_argument("store")
    parser.add_argument("root", type=Path)
    parser.add_argument("url")
    parser.add_argument("--target", default="plugins/models/large.model")
    parser.add_argument("--sha256")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--lease-seconds", type=float, default=3)
    print(json.dumps(asyncio.run(download(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
