"""Workers of two hosts that share no disk: a rounds worker on one, a methods worker on the other.

Each host has a data directory of its own, and sees no other one if the kernel lets the test mount. They share
Redis, a database outside of both, and a store.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from waiting import WAIT_SECONDS
from worker_fleet import Fleet, Worker, build_fleet

from broker_config.settings import Settings
from nekro.app.rounds.runs import CodeReport
from nekro.app.services import Services

PLUGINS = Path(__file__).parent / "plugins"


def separating(*others: Path) -> list[str]:
    """Return a command that runs another one with empty directories in place of those of other hosts."""
    return _mounting(*map(str, others)) if _can_mount() else []


def _mounting(*directories: str) -> list[str]:
    mounts = "".join(f"mount -t tmpfs none {path} && " for path in directories)
    return ["unshare", "--mount", "sh", "-c", f'{mounts}exec "$@"', "sh"]


@functools.cache
def _can_mount() -> bool:
    command = [*_mounting("/mnt"), "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


async def run(services: Services, code: str, chat_key: str) -> CodeReport:
    """Run code on the rounds worker that takes it."""
    return await services.remote_runs.run(
        code,
        run_id=uuid.uuid4().hex,
        chat=await services.chat(chat_key),
        user_id=None,
        wakes_agent=False,
        timeout_seconds=WAIT_SECONDS,
    )


class TwoHosts:
    """A fleet whose workers run on host ``a`` or ``b``."""

    def __init__(self, fleet: Fleet, directory: Path, variables: Mapping[str, str]) -> None:
        self._fleet = fleet
        self._variables = {"AWS_EC2_METADATA_DISABLED": "true", **variables}
        #: The newest worker of each host and lane.
        self.workers: dict[tuple[str, str], Worker] = {}
        self.data_dirs = {name: directory / name for name in ("a", "b")}
        for path in self.data_dirs.values():
            path.mkdir(exist_ok=True)

    def settings(self, host: str) -> Settings:
        """The settings of a host, which differ in nothing but the data directory."""
        return self._fleet.settings.model_copy(update={"data_dir": self.data_dirs[host]})

    def start(self, host: str, lane: str, **variables: str) -> Worker:
        """Start a worker on a host, with further variables; returns when it consumes."""
        (worker,) = self._fleet.start(
            lane,
            settings=self.settings(host),
            variables={**self._variables, **variables},
            prefix=separating(*(path for name, path in self.data_dirs.items() if name != host)),
        )
        self.workers[host, lane] = worker
        return worker

    def services(self) -> Services:
        """Services of the test's own process, which has no files of either host."""
        return self._fleet.services()

    def logs(self) -> str:
        return self._fleet.logs()

    def texts(self, host: str) -> list[str]:
        """The texts of all files that a host shares with programs; a running one may remove some."""
        texts = []
        for directory, _, names in os.walk(self.data_dirs[host] / "sandboxes"):
            for name in names:
                with suppress(FileNotFoundError):
                    texts.append(Path(directory, name).read_text("utf-8", "replace"))
        return texts


@contextmanager
def two_hosts(
    directory: Path,
    redis_url: str,
    store_url: str,
    variables: Mapping[str, str],
    **overrides: Any,
) -> Iterator[TwoHosts]:
    """Build two hosts without workers; ``variables`` are those that the store needs."""
    fleet = build_fleet(
        directory,
        redis_url,
        f"sqlite:///{directory}/nekro.db",
        files={"url": store_url},
        **{"plugins": {"dirs": (PLUGINS,)}, **overrides},
    )
    try:
        yield TwoHosts(fleet, directory, variables)
    finally:
        fleet.stop()
