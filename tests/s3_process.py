"""Two independent servers of S3 over HTTP: that of moto (Python), and that of rclone (Go)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx
from redis_process import dying_with_parent, free_port
from waiting import wait_until

BUCKET: Final = "nekro-files"
KEY: Final = "AKIATESTS"
SECRET: Final = "a-secret-of-the-tests"


class S3Server:
    """A server with one empty bucket; ``restart`` keeps its port, and for rclone its objects."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self._directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._files = directory / "objects"
        (self._files / BUCKET).mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """What a client of the server has in its environment."""
        return variables_of(self.url)

    def start(self) -> None:
        python = Path(sys.executable)
        command: Mapping[str, list[str]] = {
            "moto": [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            "rclone": [
                str(python.with_name("rclone")), "serve", "s3", "--addr", f"127.0.0.1:{self.port}",
                "--auth-key", f"{KEY},{SECRET}", "--config", str(self._directory / "none.conf"),
                "--no-cleanup", str(self._files),
            ],
        }  # fmt: skip
        environment = {**os.environ, "HOME": str(self._directory)}
        log = (self._directory / "server.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [*dying_with_parent(), *command[self.kind]], stdout=log, stderr=log, env=environment
            )
        wait_until(self._answers, what=f"{self.kind} serves S3")
        if self.kind == "moto":
            httpx.put(f"{self.url}/{BUCKET}").raise_for_status()

    def _answers(self) -> bool:
        try:
            httpx.get(self.url)
        except httpx.TransportError:
            return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def variables_of(url: str) -> dict[str, str]:
    """Return the environment of a client of a server of S3."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }
