"""`--processes`: what forked test processes report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

FIRST = """
import os, pytest
@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    yield os.getpid()
    (tmp_path_factory.getbasetemp() / "closed").write_text(str(os.getpid()))
def test_passes(opened): print("unseen")
def test_fails(opened):
    print("printed in a test")
    assert opened == 0
@pytest.mark.skip(reason="a reason")
def test_is_skipped(): pass
"""
SECOND = """
import os
def test_before(): pass
def test_dies(): os._exit(3)
def test_after(): pass
"""
STOPPED = """
import os, signal
def test_interrupts(): os.kill(os.getppid(), signal.SIGINT)
def test_waits(): signal.pause()
"""


def run_files(directory: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    (directory / "conftest.py").write_text("from forked_run import *\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "-rs",
        f"--basetemp={directory / 'temporary'}",
    ]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *arguments, str(directory)], env=environ, capture_output=True, text=True, cwd=directory
    )


def test_results_output_and_a_death_are_reported_once(tmp_path: Path) -> None:
    done = run_files(tmp_path, "--processes=2", first=FIRST, second=SECOND)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 3 passed, 1 skipped" in done.stdout
    assert done.stdout.count("printed in a test") == 2  # in the source and in the output of the failed test
    assert "unseen" not in done.stdout
    assert "its process ended with 3" in done.stdout
    assert "a reason" in done.stdout
    assert (tmp_path / "temporary/closed").exists()


def test_the_run_ends_after_two_deaths(tmp_path: Path) -> None:
    done = run_files(tmp_path, "--processes=2", **dict.fromkeys(["a", "b", "c", "d"], SECOND))
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "2 test processes died" in done.stdout


def test_the_first_failure_ends_the_run_if_asked(tmp_path: Path) -> None:
    done = run_files(
        tmp_path, "--processes=2", "-x", **dict.fromkeys(["a", "b", "c", "d"], "def test_it(): assert 0")
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "stopping after" in done.stdout


def test_an_interruption_ends_each_process(tmp_path: Path) -> None:
    done = run_files(tmp_path, "--processes=2", stopped=STOPPED, first=FIRST)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
