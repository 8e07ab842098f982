"""Measure what it costs to keep TOOL calls as events: ``python -m benchmarks.kept_calls``.

Two fleets on one Redis, each with a methods worker, a rounds worker and SQLite: one keeps the calls of every
turn, the other none (``NEKRO_AGENT__TOOL_CALL_SHARE``). A turn's code calls a TOOL and takes the time itself.
The fleets run their turns one after the other, and the one that begins changes with each pair. The rounds
workers write the events, so their processor time is compared too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from benchmarks.harness.figures import spread
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, cpu_seconds, interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server

__all__ = ["main", "parse"]

_PLUGINS: Final = Path(__file__).parent / "plugins"
_NEKRO: Final = str(Path(sys.executable).with_name("nekro"))
_SECONDS: Final = 120.0
#: After a turn's code has ended its last events are written.
_REST_SECONDS: Final = 1.0
_SCRIPT: Final = """
- when: "begin"
  answer: |
    ```python
    import time
    text = "x" * 50
    begin = time.perf_counter()
    for _ in range({calls}):
        touch(text)
    note((time.perf_counter() - begin) / {calls})
    ```
"""


class Fleet:
    """A methods worker and a rounds worker."""

    def __init__(self, directory: Path, redis_url: str, *, share: int, calls: int) -> None:
        directory.mkdir()
        self._figures = directory / "figures"
        self._figures.touch()
        script = directory / "script.yaml"
        script.write_text(_SCRIPT.format(calls=calls))
        self._environment: Mapping[str, str] = os.environ | {
            "NEKRO_BROKER__URL": redis_url,
            "NEKRO_BROKER__KEY_PREFIX": f"share{share}:",
            "NEKRO_DATA_DIR": str(directory / "data"),
            "NEKRO_PLUGINS__DIRS": str(_PLUGINS),
            "NEKRO_LOG__LEVEL": "WARNING",
            "NEKRO_LLM__SCRIPT": str(script),
            "NEKRO_AGENT__TOOL_CALL_SHARE": str(share),
            "NEKRO_SANDBOX__WALL_SECONDS": str(_SECONDS),
            "BENCH_FIGURES": str(self._figures),
        }
        self._command("db", "upgrade")
        self._workers = [
            Child(
                [_NEKRO, "worker", "--lane", lane],
                log=directory / f"{lane}.log",
                environment=self._environment,
            )
            for lane in ("methods", "rounds")
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            worker.stop()

    def turn(self) -> tuple[float, float]:
        """Run a turn; returns the seconds of a call, and the rounds worker's CPU seconds of the turn."""
        _, rounds = self._workers
        known = len(self._noted())
        before = cpu_seconds(rounds.pid)
        self._command("send", "bench_chat", "begin", "--user-id", "bench")
        give_up_at = time.monotonic() + _SECONDS
        while len(self._noted()) == known:
            if time.monotonic() > give_up_at:
                words = "\n".join(worker.last_words() for worker in self._workers)
                raise SystemExit(f"a turn has not ended after {_SECONDS:g} s:\n{words}")
            time.sleep(0.05)
        time.sleep(_REST_SECONDS)
        return self._noted()[-1], cpu_seconds(rounds.pid) - before

    def _noted(self) -> list[float]:
        return [float(line) for line in self._figures.read_text().split()]

    def _command(self, *words: str) -> None:
        subprocess.run([_NEKRO, *words], env=self._environment, check=True, stdout=sys.stderr)


def measure(pairs: int, calls: int) -> dict[str, list[float]]:
    """Return ratios of kept to not kept, one for each pair: ``call`` (seconds) and ``cpu``."""
    found: dict[str, list[float]] = {"call": [], "cpu": [], "kept_seconds": [], "other_seconds": []}
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        directory = Path(name)
        print(describe_machine(server.version), file=sys.stderr)
        with (
            Fleet(directory / "kept", server.url, share=1, calls=calls) as kept,
            Fleet(directory / "other", server.url, share=0, calls=calls) as other,
        ):
            for fleet in (kept, other):  # warm up
                fleet.turn()
            for number in range(pairs):
                order = (kept, other) if number % 2 == 0 else (other, kept)
                turns = {fleet: fleet.turn() for fleet in order}
                (kept_call, kept_cpu), (other_call, other_cpu) = turns[kept], turns[other]
                found["call"].append(kept_call / other_call)
                found["cpu"].append(kept_cpu / other_cpu)
                found["kept_seconds"].append(kept_call)
                found["other_seconds"].append(other_call)
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept_calls", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of turns (default: 10)")
    parser.add_argument("--calls", type=int, default=1000, help="calls of a turn (default: 1000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    interrupted_by_sigterm()
    options = parse(argv)
    found = measure(options.pairs, options.calls)
    for title, name, unit in (
        ("a call, kept / not kept", "call", ""),
        ("CPU of the rounds worker, kept / not kept", "cpu", ""),
        ("a call that is kept", "kept_seconds", " s"),
        ("a call that is not kept", "other_seconds", " s"),
    ):
        one = spread(found[name])
        if one is not None:
            print(f"{title}: {one.median:.4g}{unit} ({one.low:.4g}–{one.high:.4g})")
    if options.json is not None:
        options.json.write_text(json.dumps(found) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
