"""Skipped tests by name and reason, with their number, at the end of a run."""

from __future__ import annotations

from collections import defaultdict

import pytest


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tests that were skipped, by reason, and their number."""
    names = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple | list):
            names[str(report.longrepr[2]).removeprefix("Skipped: ")].append(report.nodeid)
    if not names:
        return
    terminalreporter.section("left out on this machine")
    for reason, left_out in sorted(names.items()):
        for name in sorted(left_out):
            terminalreporter.write_line(f"{name}: {reason}")
    counts = "; ".join(f"{reason}: {len(left_out)}" for reason, left_out in sorted(names.items()))
    terminalreporter.write_line(f"Tests left out: {sum(map(len, names.values()))} ({counts}).")
