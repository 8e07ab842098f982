"""One system with a browser per file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
sys.path.insert(0, str(Path(__file__).parent))

from console_world import Console, open_console

#: Lanes of the workers of a file that names no others in ``LANES``.
LANES = ("methods", "long", "rounds")


@pytest.fixture(scope="module")
def console(
    request: pytest.FixtureRequest,
    redis_server: Any,
    new_database: Callable[[str, Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Console]:
    """The file's system."""
    directory = tmp_path_factory.mktemp("console")
    lanes = getattr(request.module, "LANES", LANES)
    settings = getattr(request.module, "SETTINGS", {})
    with open_console(
        directory, redis_server.url, new_database("sqlite", directory), lanes=lanes, **settings
    ) as console:
        yield console


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of screenshots and figures."""
    named = os.environ.get("NEKRO_TEST_ARTEFACTS")
    directory = Path(named) if named else tmp_path_factory.mktemp("artefacts")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def picture(artefacts: Path) -> Callable[..., None]:
    """Take a picture of a page where ``NEKRO_TEST_ARTEFACTS`` names a directory; it takes a while."""

    def take(page: Any, name: str, **options: Any) -> None:
        if os.environ.get("NEKRO_TEST_ARTEFACTS"):
            page.screenshot(path=artefacts / f"{name}.png", **options)

    return take
