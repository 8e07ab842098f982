"""A fleet with workers, a language model by script, and a gateway, for the client and for commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from api_fleet import small_fleet
from gateway_process import GatewayProcess
from worker_fleet import Fleet

#: A plugin that sleeps unless it is woken.
IDLER = """
from nekro_agent.api.plugin import NekroPlugin

plugin = NekroPlugin("Idler", "idler", "", "1", "tests", "", sleep_brief="Idles.")
"""


@pytest.fixture(scope="module")
def fleet(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Workers of the lanes that a turn needs, with one plugin."""
    yield from small_fleet(tmp_path_factory.mktemp("fleet"), redis_server.url, more_plugins={"idler": IDLER})


@pytest.fixture(scope="module")
def gateway_url(fleet: Fleet) -> Iterator[str]:
    """A gateway of the fleet; clients of this process find its local key."""
    gateway = GatewayProcess(fleet)
    with gateway, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEKRO_DATA_DIR", str(fleet.settings.data_dir))
        yield gateway.url
        assert gateway.stop() == 0
