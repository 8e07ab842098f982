"""`nekro gateway` of a fleet as a process, which tests kill, stop and start again."""

from __future__ import annotations

import json
import signal
from types import TracebackType
from typing import Self

from forked_process import ForkedCommand
from local_key import local_headers
from redis_process import free_port
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

__all__ = ["GatewayProcess"]


class GatewayProcess:
    """One gateway; without options it has a port of its own, which it keeps."""

    def __init__(self, fleet: Fleet, *options: str) -> None:
        """Start nothing yet.

        Args:
            options: of `nekro gateway`, instead of a port.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._fleet, self._options = fleet, options or ("--port", str(port))
        self.log = fleet.directory / f"gateway-{port}.log"
        self.process: ForkedCommand | None = None

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it; returns before it listens."""
        with self.log.open("ab") as log:  # a pipe that no test reads would stop it
            self.process = self._fleet.command("gateway", "--json", *self._options, stderr=log.fileno())

    def wait_ready(self) -> None:
        """Wait until it listens."""
        assert self.process is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        ready = json.loads(line)
        assert ready["pid"] == self.process.pid
        self.url = ready["url"]

    @property
    def headers(self) -> dict[str, str]:
        """The header with the local key."""
        return local_headers(self._fleet.settings.data_dir)

    def kill(self) -> None:
        """SIGKILL and reap."""
        self.stop(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and reap; returns the exit code, or 0 if none runs."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.send_signal(number)
        try:
            process.communicate(WAIT_SECONDS)
        finally:
            process.kill()
        return process.wait(WAIT_SECONDS)
