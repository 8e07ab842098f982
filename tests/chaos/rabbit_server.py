"""A private RabbitMQ on loopback with its own ports, epmd, cookie and data, deleted after the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from kombu import Connection
from redis_process import dying_with_parent

from nekro_agent.execution.tied_process import tied_to_this_process

START_SECONDS = 300
LOOPBACK_ONLY = "-kernel inet_dist_use_interface {127,0,0,1}"
#: Where Debian and Red Hat install the script that does not change the user.
PLACES = ("/usr/lib/rabbitmq/bin/rabbitmq-server", "/usr/local/sbin/rabbitmq-server")


def rabbit_binary() -> str | None:
    """Path of rabbitmq-server; None where it is not installed."""
    for path in PLACES:
        if Path(path).exists() and shutil.which("epmd"):
            return path
    return None


class RabbitServer:
    """One node with ``freeze``, ``kill`` and a repeatable ``start``; its data survives a kill."""

    def __init__(self, directory: Path, *, ports: tuple[int, int, int], arguments: str = "") -> None:
        self.port, dist, epmd = ports
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self._log = directory / "rabbit.log"
        self._epmd_port = epmd
        self._environment = os.environ | {
            "HOME": str(directory),
            "ERL_EPMD_PORT": str(epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"nekro{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(dist),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{LOOPBACK_ONLY} {arguments}",
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
            "RABBITMQ_CONFIG_FILE": str(directory / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        }
        (directory / "plugins").write_text("[].\n")
        self._epmd: subprocess.Popen[bytes] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the node and wait until it accepts connections."""
        if self._epmd is None:
            self._epmd = subprocess.Popen(
                [*dying_with_parent(), "epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1"],
                stderr=subprocess.DEVNULL,
            )
        binary = rabbit_binary()
        assert binary is not None
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                tied_to_this_process(binary, end_seconds=0.5),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            assert time.monotonic() < end, self._log.read_text()[-3000:]
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            time.sleep(0.2)

    def freeze(self) -> None:
        """SIGSTOP the node and every process that it started."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT, after ``freeze``."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL the node and every process that it started."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(START_SECONDS)
            self.process = None

    def close(self) -> None:
        """End the node and its epmd."""
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(START_SECONDS)

    def _answers(self) -> bool:
        try:
            with Connection(self.url, connect_timeout=2) as connection:
                connection.connect()
            return True
        except Exception:
            return False
