"""Sandboxes that are prepared before their code arrives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import lab
from waiting import WAIT_SECONDS, eventually

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import SandboxSpec
from nekro.sandbox.drivers import isolated
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.process import ProcessSandbox
from nekro.sandbox.manager import WarmPool
from nekro.sandbox.models import StopType
from nekro_agent.errors import SandboxUnavailableError


class CountingDriver(BwrapDriver):
    """The real driver, with a record of the sandboxes that it started."""

    def __init__(self, driver: BwrapDriver) -> None:
        super().__init__(driver._settings)
        self.started: list[ProcessSandbox] = []

    async def start(self, spec: SandboxSpec) -> ProcessSandbox:
        sandbox = await super().start(spec)
        self.started.append(sandbox)
        return sandbox


@pytest.fixture
def driver(bwrap_driver: BwrapDriver) -> CountingDriver:
    return CountingDriver(bwrap_driver)


async def test_prepared_sandbox_is_used_once(driver: CountingDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=driver) as box:
        await box.prepare()
        results = [await box.run("print(1)") for _ in range(2)]
    assert [(result.warm, result.output) for result in results] == [(True, "1\n"), (False, "1\n")]
    assert len(driver.started) == 2


async def test_preparing_twice_starts_one(driver: CountingDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=driver) as box:
        await asyncio.gather(box.prepare(), box.prepare())
        assert len(driver.started) == 1


async def test_prepared_sandbox_serves_its_own_chat_only(driver: CountingDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=driver) as box:
        await box.prepare("one")
        assert not (await box.run("", chat_key="two")).warm
        assert (await box.run("print(_ck)", chat_key="one")).output == "one\n"


async def test_number_of_waiting_sandboxes_is_bounded(driver: CountingDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=driver, max_concurrent=2) as box:
        for number in range(4):
            await box.prepare(f"chat{number}")
        assert len(driver.started) == 2


async def test_waiting_sandbox_ends_when_it_is_too_old(driver: CountingDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=driver, warm_seconds=0.2) as box:
        await box.prepare()
        (sandbox,) = driver.started
        await asyncio.wait_for(sandbox.wait(), WAIT_SECONDS)
        assert not (await box.run("print(1)")).warm


async def test_zero_waiting_time_prepares_nothing(driver: CountingDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=driver, warm_seconds=0) as box:
        await box.prepare()
        assert driver.started == []


async def test_waiting_sandbox_that_died_is_replaced(driver: CountingDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=driver) as box:
        await box.prepare()
        driver.started[0].kill()
        await driver.started[0].wait()
        result = await box.run("print(1)")
    assert (result.stop_type, result.warm) == (StopType.NORMAL, False)


async def test_preloaded_modules_are_imported_before_the_code(driver: CountingDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, preload=["fractions"]) as box:
        await box.prepare()
        result = await box.run("import sys; print('fractions' in sys.modules)")
    assert (result.warm, result.output) == (True, "True\n")


async def test_closing_the_manager_ends_waiting_sandboxes(driver: CountingDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=driver) as box:
        await box.prepare()
    assert not driver.started[0].alive


@pytest.mark.parametrize("is_late", [False, True])
async def test_failed_preparation_fails_the_run_again(
    bwrap_driver: BwrapDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    async def late(*arguments: Any) -> int:
        """Look at a sandbox's process when the process has ended."""
        first_pid = await look(*arguments)
        await eventually(lambda: not Path(f"/proc/{first_pid}").exists(), what="the end of the process")
        return first_pid

    if is_late:
        look = isolated._first_pid
        monkeypatch.setattr(isolated, "_first_pid", late)
    broken = BwrapDriver(SandboxSettings(fork_server=False))
    broken.__dict__["_runner"] = b"raise SystemExit('broken')"
    async with lab(tmp_path, use=broken) as box:
        await box.prepare()
        with pytest.raises(SandboxUnavailableError, match="broken"):
            await box.run("")


async def test_cancelled_acquisition_does_not_leak_the_sandbox(
    bwrap_driver: BwrapDriver, tmp_path: Path
) -> None:
    pool = WarmPool(most=1, seconds=60)
    gate = asyncio.Event()
    started: list[ProcessSandbox] = []
    for name in ("shared", "uploads"):
        (tmp_path / name).mkdir()
    spec = SandboxSpec(shared_dir=tmp_path / "shared", uploads_dir=tmp_path / "uploads", uid=200_001)

    async def start() -> ProcessSandbox:
        await gate.wait()
        started.append(await bwrap_driver.start(spec))
        return started[0]

    pool.prepare("key", start)
    taker = asyncio.create_task(pool.take("key"))
    await asyncio.sleep(0)
    taker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taker
    gate.set()
    await pool.close()
    assert not started[0].alive
