"""The client process of a turn: ``python -m benchmarks.harness.client NAME``.

It reads commands as JSON lines from stdin and answers each with one JSON line on stdout:
``{"do": "prepare" | "first" | "sequential" | "flood" | "peak" | "close", …}`` with
``{"event": "done", …}``, ``{"event": "unavailable", "reason": …}`` or ``{"event": "failed", …}``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import IO, Any

from benchmarks.harness.contender import Client, Contender, NotAvailableError, Setup
from benchmarks.peers import contender_named

__all__ = ["main"]


class _Session:
    def __init__(self, contender: Contender, setup: Setup) -> None:
        self._contender = contender
        self._setup = setup
        self._client: Client | None = None

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "prepare":
                self._contender.prepare(self._setup)
                self._client = self._contender.open_client(self._setup)
                return {}
            case "first":
                self._opened.first()
                return {}
            case "sequential":
                latencies = self._opened.sequential(command["calls"], warm_up=command["warm_up"])
                return {"latencies": latencies}
            case "flood":
                return {"seconds": self._opened.flood(command["calls"], in_flight=command["in_flight"])}
            case "peak":
                return {"helpers_peak_bytes": self._opened.peak_bytes()}
            case "close":
                self._opened.close()
                return {}
            case other:
                raise ValueError(f"unknown command {other!r}")

    @property
    def _opened(self) -> Client:
        if self._client is None:
            raise RuntimeError("the first command must be 'prepare'")
        return self._client


def _answer(session: _Session, line: bytes) -> dict[str, Any]:
    try:
        return {"event": "done", **session.obey(json.loads(line))}
    except NotAvailableError as exc:
        return {"event": "unavailable", "reason": str(exc)}
    except Exception as exc:  # the edge of the process: the harness reports it and continues
        traceback.print_exc()
        return {"event": "failed", "reason": f"{type(exc).__name__}: {exc}"}


def _own_stdout() -> IO[bytes]:
    """Reserve the real stdout for answers, so that a library's print cannot break the protocol."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def main(name: str) -> None:
    """Serve one turn until stdin is closed."""
    session = _Session(contender_named(name), Setup.from_environment())
    with _own_stdout() as answers:
        for line in sys.stdin.buffer:
            answers.write(json.dumps(_answer(session, line)).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
