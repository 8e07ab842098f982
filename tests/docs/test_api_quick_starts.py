"""The quick starts of ``docs/api.md`` run as they stand, on a fleet with a gateway."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_fleet import small_fleet
from gateway_process import GatewayProcess
from worker_fleet import Fleet

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parent.parent.parent

TEXT = (ROOT / "docs" / "api.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"^## (With .+?|Run code)\n.*?^```\w+\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def fleet(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Workers of the lanes that a turn needs, with the methods that each system has."""
    yield from small_fleet(tmp_path_factory.mktemp("fleet"), redis_server.url, load_shipped=True)


@pytest.fixture(scope="module")
def url(fleet: Fleet) -> Iterator[str]:
    """A gateway of the fleet."""
    with GatewayProcess(fleet) as gateway:
        yield gateway.url


def run(url: str, name: str, *command: str, **variables: str) -> str:
    source = BLOCKS[name].replace("http://127.0.0.1:8600", url)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("NEKRO_", "OPENAI_"))}
    done = subprocess.run(
        [*command, source], cwd=ROOT, env={**clean, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_each_quick_start() -> None:
    assert list(BLOCKS) == ["With curl", "With the client", "Run code", "With the openai package"]


def test_the_quick_start_with_curl(url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    out = run(url, "With curl", "bash", "-euc")
    assert '"you said hello"' in out and "Note 'Shopping' saved as 'shop'" in out
    assert '"path":"/app/uploads/README.md"' in out
    assert "event: turn.ended" in out and '"status"' not in out


def test_the_quick_start_with_the_client(url: str) -> None:
    out = run(url, "With the client", sys.executable, "-c")
    assert out.startswith("['you said hello']\n") and out.endswith("turn.ended\n")


def test_code_runs_as_documented(url: str) -> None:
    run(url, "With curl", "bash", "-euc")  # saves the note
    assert run(url, "Run code", sys.executable, "-c", NEKRO_URL=url) == "{'shop': 'Shopping'}\n"


def test_the_quick_start_with_the_openai_package(fleet: Fleet) -> None:
    created = fleet.run("keys", "create", "quick", "--scope", "read", "--scope", "post")
    name, key = "With the openai package", created.stdout.strip()
    try:
        with GatewayProcess(fleet) as gateway:
            assert run(gateway.url, name, sys.executable, "-c", NEKRO_KEY=key) == "you said hello\n"
    finally:
        fleet.run("keys", "revoke", key.split("_")[1])
