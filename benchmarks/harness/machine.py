"""Describe the machine of a run, which is needed to interpret its figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BUSY_LOAD_PER_CORE", "Machine", "describe_machine", "library_versions"]

#: Above this load the report warns that other work uses the cores.
BUSY_LOAD_PER_CORE = 0.25

_LIBRARIES = (
    "celery", "dramatiq", "fastapi", "h11", "hiredis", "httptools", "kombu", "pydantic", "redis", "requests",
    "sqlalchemy", "taskiq", "taskiq-redis", "uvicorn", "uvloop",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine at the start of a run."""

    cores: int
    cpu: str
    kernel: str
    python: str
    redis: str
    load_1m: float

    @property
    def busy(self) -> bool:
        """Whether other work was running when the run began."""
        return self.load_1m > BUSY_LOAD_PER_CORE * self.cores


def describe_machine(redis_version: str) -> Machine:
    """Return the properties of this machine and its present load."""
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu=_cpu_name(),
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {sys.version.split()[0]}",
        redis=redis_version,
        load_1m=os.getloadavg()[0],
    )


def library_versions() -> dict[str, str]:
    """Return the versions of the contenders' libraries that are installed."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
