"""Flame graphs of running processes: py-spy records them, and the costs of functions are read from them."""

from __future__ import annotations

import re
import subprocess
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from benchmarks.harness.contender import NotAvailableError

__all__ = ["PRODUCT", "Cost", "Recorder", "costs"]

#: Packages of the product.
PRODUCT: Final = (
    "nekro",
    "workers",
    "storage",
    "broker_config",
    "nekro_agent",
    "nekro_client",
    "plugin_pkgs",
)
_SVG: Final = "{http://www.w3.org/2000/svg}"
_SAMPLES: Final = "{http://github.com/jonhoo/inferno}"
#: `name (file:first line) (12 samples, 3.45%)`; native frames have no file.
_TITLE: Final = re.compile(
    r"(?P<function>.+) \((?P<file>[^():]+):(?P<line>\d+)\) \([\d,]+ samples?, [\d.]+%\)"
)
_WRITE_SECONDS: Final = 60


class Recorder:
    """One `py-spy record`, of a running process or of a command that it starts."""

    def __init__(self, target: Path, *, rate: int) -> None:
        """Create it; the flame graph will be ``target``, of ``rate`` samples per second."""
        self.target = target
        self._log = target.with_suffix(".log")
        self._rate = rate
        self._process: subprocess.Popen[bytes] | None = None

    def attach(self, pid: int, *, seconds: int) -> None:
        """Record a process for a time, in the background.

        Raises:
            NotAvailableError: py-spy is not installed.
        """
        self._start(self.command("--duration", str(seconds), "--pid", str(pid)))

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of py-spy.

        Raises:
            NotAvailableError: py-spy is not installed.
        """
        program = Path(sys.executable).with_name("py-spy")
        if not program.exists():
            raise NotAvailableError("py-spy is not installed (pip install -e '.[bench]')")
        # By function, not by line; without threads that wait.
        options = ("--function", "--gil", "--rate", str(self._rate), "--output", str(self.target))
        return [str(program), "record", *options, *arguments]

    @property
    def is_recording(self) -> bool:
        """Whether it still records."""
        return self._process is not None and self._process.poll() is None

    def finish(self) -> None:
        """Wait until the flame graph is written.

        Raises:
            NotAvailableError: it could not be recorded; the message has what py-spy said.
        """
        if self._process is None:
            return
        try:
            self._process.wait(_WRITE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
        if not self.target.exists():
            raise NotAvailableError(f"py-spy: {self._log.read_text('utf-8', 'replace').strip()}")
        self._log.unlink()

    def _start(self, command: Sequence[str]) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a function of the product cost, as shares of all samples."""

    function: str
    #: File and first line.
    place: str
    #: In the function and in what it calls outside of the product.
    own: float
    #: In the function and in all that it calls; recursion counts once.
    total: float


@dataclass(frozen=True, kw_only=True)
class _Frame:
    depth: int
    left: int
    width: int
    function: str
    place: str
    is_product: bool

    @property
    def key(self) -> tuple[str, str]:
        return self.function, self.place


def costs(path: Path) -> list[Cost]:
    """Return the functions of the product in a flame graph of py-spy, the most expensive one first."""
    frames = _frames(path)
    everything = frames[0].width if frames else 0
    levels: dict[int, list[_Frame]] = defaultdict(list)
    for frame in frames:
        levels[frame.depth].append(frame)
    depths = sorted(levels)
    own: dict[tuple[str, str], int] = defaultdict(int)
    total: dict[tuple[str, str], int] = defaultdict(int)
    #: Of each frame of the level above: the frames of the product from the root to it.
    above: list[tuple[_Frame, tuple[tuple[str, str], ...]]] = []
    for depth, below in zip(depths, [*depths[1:], None], strict=True):
        lefts = [frame.left for frame, _ in above]
        level = []
        for frame in sorted(levels[depth], key=lambda frame: frame.left):
            stack = above[bisect_right(lefts, frame.left) - 1][1] if above else ()
            if frame.is_product:
                if frame.key not in stack:
                    total[frame.key] += frame.width
                stack = (*stack, frame.key)
            level.append((frame, stack))
        children = sorted(levels[below], key=lambda frame: frame.left) if below is not None else []
        for frame, stack in level:
            inner = sum(c.width for c in children if frame.left <= c.left < frame.left + frame.width)
            if stack:
                own[stack[-1]] += frame.width - inner
        above = level
    found = [
        Cost(function=key[0], place=key[1], own=own[key] / everything, total=total[key] / everything)
        for key in total
    ]
    return sorted(found, key=lambda cost: cost.own, reverse=True)


def _frames(path: Path) -> list[_Frame]:
    """Return the frames of a flame graph, the one of all samples first."""
    found = []
    for group in ElementTree.parse(path).iter(f"{_SVG}g"):  # our own file
        title, box = group.find(f"{_SVG}title"), group.find(f"{_SVG}rect")
        if title is None or box is None or box.get(f"{_SAMPLES}w") is None:
            continue
        read = _TITLE.fullmatch(title.text or "")
        file = read["file"] if read else ""
        found.append(
            _Frame(
                depth=round(float(box.get("y", "0"))),
                left=int(box.get(f"{_SAMPLES}x", "0")),
                width=int(box.get(f"{_SAMPLES}w", "0")),
                function=read["function"] if read else title.text or "",
                place=f"{file}:{read['line']}" if read else "",
                is_product=file.partition("/")[0] in PRODUCT,
            )
        )
    return sorted(found, key=lambda frame: frame.depth)
