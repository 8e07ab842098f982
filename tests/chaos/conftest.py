"""Fleets of real workers on a Redis of their own, for tests that inject faults."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from chaos_world import LEASE_SECONDS  # noqa: E402
from worker_fleet import Fleet, build_fleet  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture(params=["sqlite", "postgres"])
def each_database(request: pytest.FixtureRequest) -> str:
    """Kind of database; each test runs once per kind."""
    return str(request.param)


@pytest.fixture
def make_chaos(
    own_redis: Any, make_database: Callable[[str], Any], tmp_path: Path
) -> Iterator[Callable[..., Fleet]]:
    """Build a fleet on the test's own Redis; with ``append_only`` its data survives SIGKILL."""
    fleets: list[Fleet] = []

    def build(
        database: str = "sqlite",
        *,
        append_only: bool = False,
        broker_url: str | None = None,
        database_url: str | None = None,
        **overrides: Any,
    ) -> Fleet:
        if append_only:
            own_redis.stop()
            own_redis.append_only = True
            own_redis.start()
        values: dict[str, Any] = {
            "plugins": {"dirs": (HERE / "plugins",)},
            "agent": {"lease_seconds": 3},
        }
        for name, value in overrides.items():
            values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
        values["broker"] = {"visibility_timeout_seconds": LEASE_SECONDS, **values.get("broker", {})}
        directory = tmp_path / f"fleet{len(fleets)}"
        directory.mkdir()
        url = database_url or make_database(database).url
        # Migrations run an event loop of their own; this thread already has one.
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(
                build_fleet, directory, broker_url or own_redis.url, url, is_forked=False, **values
            )
            fleets.append(made.result())
        return fleets[-1]

    yield build
    for fleet in fleets:
        fleet.stop()


@pytest.fixture
def failpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Make workers that start from now on exit at a failpoint, once: the first worker that reaches it."""

    def arm(point: str) -> None:
        path = os.pathsep.join((str(HERE / "failpoints"), str(HERE.parent.parent)))
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setenv("NEKRO_TEST_FAILPOINT", point)
        monkeypatch.setenv("NEKRO_TEST_FAILPOINT_ONCE", str(tmp_path / "crashed"))

    return arm
