"""Asking the workers of this host how they are; the client of ``workers.monitor``."""

from __future__ import annotations

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from workers.sockets import monitor_sockets

__all__ = ["Answer", "Probe", "ask_workers"]

#: Beyond what a worker takes to find its loop or its database hanging.
_ANSWER_SECONDS: Final = 15.0


class Probe(StrEnum):
    """What is asked."""

    #: Whether it must be restarted: its event loop does not turn.
    LIVE = "live"
    #: Whether it takes calls: it has started, has a broker and a database, and is not stopping.
    READY = "ready"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one worker said."""

    lane: str
    worker: str
    pid: int
    ok: bool
    faults: tuple[str, ...] = ()


def ask_workers(probe: Probe, *, lane: str | None = None) -> list[Answer]:
    """Ask each worker of this user on this host, or of a lane; those that are gone give no answer.

    Raises:
        ServiceError: the directory of their sockets is not this user's alone.
    """
    paths = monitor_sockets(lane)
    # At once: each that hangs takes the whole time.
    with ThreadPoolExecutor(max(1, len(paths))) as pool:
        answers = list(pool.map(lambda path: _ask(path, probe), paths))
    return [answer for answer in answers if answer is not None]


def _ask(path: Path, probe: Probe) -> Answer | None:
    lane, _, number = path.stem.rpartition(".")
    connection = _Connection(path)
    try:
        connection.request("GET", f"/{probe}z")
        told: dict[str, Any] = json.loads(connection.getresponse().read())
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)  # left behind by a worker that was killed
        return None
    except (OSError, http.client.HTTPException, ValueError) as exc:
        fault = f"it does not answer ({type(exc).__name__})"
        return Answer(lane=lane, worker=path.stem, pid=int(number), ok=False, faults=(fault,))
    finally:
        connection.close()
    return Answer(
        lane=told["lane"], worker=told["worker"], pid=int(number), ok=told["ok"], faults=tuple(told["faults"])
    )


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("worker", timeout=_ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
