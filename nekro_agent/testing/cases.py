"""A fixture that runs saved cases: ``pytest_plugins = ["nekro_agent.testing.cases"]`` in a ``conftest.py``.

    def test_rain(replay_case):
        replay_case("cases/rain.yaml")

`nekro replay TURN --save cases/rain.yaml` saves a case, and `nekro eval` runs it without pytest.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

from broker_config.settings import Settings
from nekro.app.rounds.cases import CaseResult, find_cases, run_cases

__all__ = ["ReplayCase", "replay_case"]


class ReplayCase(Protocol):
    """The fixture ``replay_case``."""

    def __call__(self, path: str | Path) -> None:
        """Run a case, or all cases of a directory, in a sandbox; the test fails where one differs.

        Nothing but the sandbox is needed, and no method of a plugin runs: calls get the answers of the file.

        Args:
            path: relative to the directory of the test.

        Raises:
            UsageError: a file is no case.
            SandboxUnavailableError: this machine has no isolation that satisfies the settings.
        """
        ...


@pytest.fixture
def replay_case(request: pytest.FixtureRequest) -> ReplayCase:
    """Return what runs a saved case; see ``ReplayCase``."""

    def run(path: str | Path) -> None:
        paths = find_cases([request.path.parent / path])
        # On a loop of its own, because the test may be a coroutine.
        with ThreadPoolExecutor(1) as thread:
            results = thread.submit(asyncio.run, run_cases(Settings.load(), paths)).result()
        if found := "\n".join(_differences(results)):
            pytest.fail(found, pytrace=False)

    return run


def _differences(results: list[CaseResult]) -> list[str]:
    return [
        f"{result.path}: program {program.number}: {one.kind}"
        f"{'' if one.line is None else f' (line {one.line})'}: {one.text}"
        for result in results
        for program in result.programs
        for one in program.differences
    ]
