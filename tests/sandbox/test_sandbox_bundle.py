"""The runner as one file, for interpreters of every version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nekro.sandbox.interpreter import guest_program


def interpreters() -> list[str]:
    """The CPythons of this machine that may run sandboxed code."""
    places = ("/usr/bin", "/usr/local/bin", *map(str, Path.home().glob(".pyenv/versions/*/bin")))
    found = {path.resolve() for place in places for path in Path(place).glob("python3.1[1-9]")}
    return sorted({sys.executable, *map(str, found)})


@pytest.mark.parametrize("python", interpreters())
def test_the_source_of_the_runner_is_understood_by_every_interpreter(python: str) -> None:
    code = "import sys; compile(sys.stdin.buffer.read(), 'runner.py', 'exec')"
    done = subprocess.run([python, "-c", code], input=guest_program(None), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
