"""Comparison of the host's clock with those of the broker and the database."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from broker_config.settings import Settings
from nekro.cli.doctor import service_checks
from nekro.cli.doctor.checks import run_checks
from nekro.cli.doctor.service_checks import CheckState, clock_offsets


@pytest.fixture
def settings(redis_url: str, postgres_server: Any, tmp_path: Path) -> Settings:
    return Settings.load(
        env_file=None,
        data_dir=tmp_path,
        broker={"url": redis_url},
        database={"url": postgres_server.create_database()},
    )


@pytest.mark.parametrize("ahead_seconds", [3600.0, -3600.0])
async def test_a_wrong_host_clock_is_measured(settings: Settings, ahead_seconds: float) -> None:
    began = time.monotonic()
    offsets = await clock_offsets(settings, clock=lambda: time.time() + ahead_seconds)
    exchange = time.monotonic() - began
    assert set(offsets) == {"broker", "database"}
    assert all(abs(offset - ahead_seconds) <= exchange for offset in offsets.values())


async def test_unreachable_servers_are_left_out_of_the_comparison(tmp_path: Path) -> None:
    settings = Settings.load(
        env_file=None,
        data_dir=tmp_path,
        broker={"url": "redis://127.0.0.1:1/0"},
        database={"url": "postgresql://u@127.0.0.1:1/x"},
    )
    assert await clock_offsets(settings) == {}


@pytest.mark.parametrize(
    ("ahead_seconds", "verdict"),
    [(0.0, CheckState.OK), (4.0, CheckState.WARNING), (-3600.0, CheckState.FAILED)],
)
def test_the_doctor_prints_one_line_per_clock(
    settings: Settings, ahead_seconds: float, verdict: CheckState, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def offsets(_: Settings) -> dict[str, float]:
        return {"broker": ahead_seconds}

    monkeypatch.setattr(service_checks, "clock_offsets", offsets)
    checks = asyncio.run(run_checks(settings))
    (line,) = [check for check in checks if check.name.startswith("clock of")]
    assert line.verdict is verdict
    assert ("3600.0 s behind" in line.detail) is (verdict is CheckState.FAILED)
