"""Processes with a shifted clock, as on a host whose clock is wrong."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("shifted_clock.c")


def shifted_clock(seconds: int) -> dict[str, str]:
    """Environment variables of a process whose clock is ahead by ``seconds``; negative: behind."""
    return {"LD_PRELOAD": str(_library()), "NEKRO_TEST_CLOCK_SHIFT": str(seconds)}


@functools.cache
def _library() -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    directory = Path(tempfile.mkdtemp(prefix="nekro-clock-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    library = directory / "shifted_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library
