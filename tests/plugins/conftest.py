"""Fixtures of the plugin tests."""

from __future__ import annotations

import pytest
from file_server import file_server
from plugin_world import authored, spec, start_world

from nekro_agent.core.logger import configure

__all__ = ["authored", "file_server", "spec", "start_world"]


@pytest.fixture(autouse=True, scope="session")
def quiet_log() -> None:
    """Plugins that fail on purpose should not fill the report with tracebacks."""
    configure(level="CRITICAL")
