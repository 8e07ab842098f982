"""A gateway in a process of its own, for tests that kill it: ``gateway_process SETTINGS PORT``."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import httpx
import uvicorn
from forked_process import ForkedProcess
from waiting import WAIT_SECONDS, wait_until

from broker_config.settings import Settings

__all__ = ["GatewayProcess"]


class GatewayProcess:
    """One gateway; it keeps its port when it is started again."""

    def __init__(self, settings: Settings, log: Path) -> None:
        values = settings.model_dump(mode="json")
        values["security"] = {"signing_key": "test-signing-key"}
        self._arguments = [json.dumps(values)]
        self._log = log
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.process: ForkedProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; returns before it listens."""
        with self._log.open("ab") as output:
            self.process = ForkedProcess(
                "gateway_process",
                [*self._arguments, str(self.port)],
                environ=dict(os.environ),
                stdout=output.fileno(),
            )

    def wait_ready(self) -> None:
        """Wait until it answers."""
        wait_until(self._answers, what=lambda: f"the gateway:\n{self._log.read_text()}")

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """SIGKILL and reap."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_SECONDS)
            self.process = None


def main(settings: str, port: str) -> None:
    """Serve until killed."""
    from gateway.app import create_app

    app = create_app(Settings.load(env_file=None, **json.loads(settings)))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_config=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
