"""The tour of `nekro demo` by workers of two hosts that share no disk, each on a server of S3."""

from __future__ import annotations

import asyncio
import socket
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from pydantic import SecretStr
from s3_process import BUCKET, S3Server
from two_hosts import separating

from broker_config.settings import Settings
from nekro.cli.commands.demo import load_demo
from nekro.cli.environment import environment_of
from nekro.cli.services.process import ChildProcess, ChildSpec

pytestmark = pytest.mark.extended

#: Files go from one host to the other in each direction.
HOSTS = {"rounds-1": "a", "methods-1": "b", "long-1": "b", "rounds-2": "b", "methods-2": "a"}


class _Log:
    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def close(self) -> None:
        pass


class Placed:
    """Starts each worker of the tour on its host."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for host in set(HOSTS.values()):
            (directory / host).mkdir(parents=True)
        self.logs: list[Path] = []

    async def start(
        self, specs: Iterable[ChildSpec], settings: Settings, *, directory: Path
    ) -> list[ChildProcess]:
        """Take the place of ``nekro.cli.services.system.start_workers``."""
        return [await self._start(spec, settings, directory) for spec in specs]

    async def _start(self, spec: ChildSpec, settings: Settings, directory: Path) -> ChildProcess:
        host = HOSTS[spec.name]
        own = settings.model_copy(update={"data_dir": self.directory / host})
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *separating(*(path for path in self.directory.iterdir() if path.name != host)),
                *(sys.executable, "-P", "-m", "nekro.cli.main", *spec.arguments),
                *("--supervisor-fd", str(theirs.fileno())),
                env=environment_of(own),
                cwd=directory,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.logs.append(self.directory.parent / f"{spec.name}.log")
        return ChildProcess.attach(spec, process, ours, _Log(self.logs[-1]))

    def said(self) -> str:
        return "\n".join(f"--- {log.stem}\n{log.read_text()[-3000:]}" for log in self.logs)


@pytest.mark.parametrize("kind", ["moto", "rclone"])
async def test_every_point_of_the_tour_holds_on_two_hosts(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3_server: Callable[[str], S3Server],
) -> None:
    for name, value in {**s3_server(kind).variables, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    points, stages, tour = (load_demo(name) for name in ("points", "stage", "tour"))
    placed = Placed(tmp_path / "hosts")
    monkeypatch.setattr(stages, "start_workers", placed.start)
    base = stages.demo_settings(Settings.load(env_file=None), tmp_path / "operator")
    settings = base.model_copy(
        update={
            "files": base.files.model_copy(update={"url": f"s3://{BUCKET}/{uuid.uuid4().hex}"}),
            "security": base.security.model_copy(update={"signing_key": SecretStr("k" * 64)}),
        }
    )
    said: list[str] = []
    async with stages.open_stage(settings) as stage:
        evidence = await tour.play(stage, say=said.append)
    failed = [point for point in points.check(evidence) if not point.ok and not point.is_left_out]
    assert failed == [], placed.said()
    for host in ("a", "b"):
        uploads = (placed.directory / host / "uploads").rglob("*")
        assert any(path.is_file() for path in uploads), host
