"""Every guard of a run, broken in every possible way: the run ends and names the guard."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import Lab, lab
from waiting import WAIT_SECONDS, wait_until

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Sandbox, SandboxSpec
from nekro.sandbox.drivers.selection import build_driver
from nekro.sandbox.limits.guards import Guard, Guards
from nekro.sandbox.limits.processes import UnsettledError
from nekro.sandbox.models import Limit, RunResult, StopType

ENDLESS = "import time\nwhile True:\n    print('x', flush=True)\n    time.sleep(0.01)"
#: A busy machine delays also the guards that a test leaves alone.
BOUND_SECONDS = 2.0


class FaultyDriver:
    """The real driver; started sandboxes are made faulty before they are returned."""

    def __init__(self, settings: SandboxSettings, spoil: Callable[[Any], None]) -> None:
        self._driver = build_driver(settings)
        self._spoil = spoil
        self.name = self._driver.name

    async def examine(self) -> tuple[Any, ...]:
        return await self._driver.examine()

    async def start(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self._driver.start(spec)
        self._spoil(sandbox)
        return sandbox

    async def close(self) -> None:
        await self._driver.close()


@contextlib.asynccontextmanager
async def faulty_lab(root: Path, spoil: Callable[[Any], None], **changes: Any) -> AsyncIterator[Lab]:
    driver = FaultyDriver(SandboxSettings(**changes), spoil)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nekro.sandbox.run.GUARD_SECONDS", BOUND_SECONDS)
        async with lab(root, use=driver, **changes) as box:
            yield box


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the test's end, for everything that blocks until then."""
    event = threading.Event()
    yield event
    event.set()


def faulty(fault: str, released: threading.Event) -> Callable[..., Any]:
    """A call that raises, blocks until the test ends, or cannot read."""

    def call(*_: object, **__: object) -> Any:
        if fault == "stalls":
            released.wait()
            raise AssertionError("the test is over")
        if fault == "cannot read":
            raise PermissionError(errno.EACCES, "/proc/of/the/host")
        raise ZeroDivisionError("/proc/of/the/host")

    return call


def assert_ended_by(result: RunResult, guard: str) -> None:
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.GUARD), result
    assert result.error is not None
    assert repr(guard) in result.error, result.error
    assert "/" not in result.error


FAULTS = ["raises", "stalls", "cannot read"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("guard", ["disk", "memory"])
async def test_a_look_that_fails_ends_the_run(
    bwrap_driver: object, tmp_path: Path, released: threading.Event, guard: str, fault: str
) -> None:
    def spoil(sandbox: Any) -> None:
        call = faulty(fault, released)
        if guard == "memory":
            # As without kernel limits of memory: only that look reads the usage.
            sandbox.__class__ = type(
                "Unbounded", (type(sandbox),), {"memory_bounded": property(lambda _: False), "usage": call}
            )
        else:
            # As with kernel limits of memory: only the look at the disk lists the processes.
            sandbox.__class__ = type(
                "Bounded", (type(sandbox),), {"memory_bounded": property(lambda _: True), "processes": call}
            )

    async with faulty_lab(tmp_path, spoil) as box:
        assert_ended_by(await box.run(ENDLESS), guard)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failing_output_reader_ends_the_run(bwrap_driver: object, tmp_path: Path, fault: str) -> None:
    ended = threading.Event()

    def watch(text: str) -> None:
        if fault == "stalls":
            wait_until(lambda: not started[0].alive, what="the end of the sandbox")
            ended.set()

    started: list[Any] = []

    def spoil_read(sandbox: Any) -> None:
        started.append(sandbox)
        if fault != "stalls":
            sandbox.output.read = _raising(faulty(fault, ended))

    async with faulty_lab(tmp_path, spoil_read) as box:
        assert_ended_by(await box.run(ENDLESS, on_output=watch), "output")
    assert ended.is_set() == (fault == "stalls")


def _raising(call: Callable[[], Any]) -> Callable[..., Any]:
    async def read(_: int = -1) -> bytes:
        return bytes(call())

    return read


@pytest.mark.parametrize("fault", ["raises", "cannot read"])
async def test_a_failed_wait_for_the_end_ends_the_run(
    bwrap_driver: object, tmp_path: Path, released: threading.Event, fault: str
) -> None:
    def spoil(sandbox: Any) -> None:
        sandbox.wait = _raising(faulty(fault, released))

    async with faulty_lab(tmp_path, spoil) as box:
        assert_ended_by(await box.run(ENDLESS), "end")


async def test_a_sandbox_whose_end_is_never_seen_ends_the_run(
    bwrap_driver: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(sandbox: Any) -> None:
        async def wait() -> None:
            await asyncio.Event().wait()

        sandbox.wait = wait

    monkeypatch.setattr("nekro.sandbox.run._EXIT_SECONDS", 0.1)
    monkeypatch.setattr("nekro.sandbox.run.GONE_SECONDS", 0.1)
    async with faulty_lab(tmp_path, spoil) as box:
        assert_ended_by(await box.run("print(1)"), "end")


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyError("lost"), OSError(5, "/host")])
async def test_a_bridge_that_fails_ends_the_run(
    bwrap_driver: object, tmp_path: Path, error: Exception
) -> None:
    """Only a closed socket is not a failure of the bridge."""

    def spoil(sandbox: Any) -> None:
        def is_closing() -> bool:
            if frames:
                raise error
            frames.append("RUN")
            return False

        frames: list[str] = []
        sandbox.writer.is_closing = is_closing

    async with faulty_lab(tmp_path, spoil) as box:
        result = await box.run("echo(1)")
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.GUARD), result
    assert result.error == f"the run was ended because its bridge failed ({type(error).__name__})"


@pytest.mark.parametrize("timer", ["wall", "unread"])
async def test_a_run_ends_when_a_busy_loop_delays_its_timers(
    bwrap_driver: object, tmp_path: Path, timer: str
) -> None:
    """The loop is busy until the sandbox has ended, so none of its own timers can end the run."""
    started: list[Any] = []
    ended: list[bool] = []

    def wait_for_the_end(*_: object) -> None:
        wait_until(lambda: not started[0].alive, what="the end of the sandbox")
        ended.append(True)

    code = {
        "wall": "busy()",
        # Unread answers fill the socket; the second call makes the loop busy.
        "unread": """
import os, select, struct, time
def call(number, name):
    payload = name + b"\\0[[],{}]"
    os.write(3, struct.pack(">IBI", len(payload) + 5, 3, number) + payload)
call(1, b"large")
select.select([3], [], [])  # its answer is under way
call(2, b"busy")
time.sleep(60)
""",
    }[timer]
    changes = {"wall_seconds": 2.0} if timer == "unread" else {}
    async with faulty_lab(tmp_path, started.append, **changes) as box:
        box.handlers["busy"] = wait_for_the_end
        box.handlers["large"] = lambda: "x" * (4 << 20)
        result = await box.run(code, wall_seconds=5 if timer == "wall" else 60)
    assert ended
    assert_ended_by(result, timer)


async def test_looks_continue_when_the_shared_thread_pool_is_exhausted(
    bwrap_driver: object, tmp_path: Path, released: threading.Event
) -> None:
    code = "import os, time\nopen('shared/big', 'wb').write(b'x' * (3 << 20))\nblock()\ntime.sleep(60)"
    async with lab(tmp_path, shared_bytes=1 << 20) as box:

        def block() -> None:
            for _ in range(64):
                asyncio.get_running_loop().run_in_executor(None, released.wait)

        box.handlers["block"] = block
        run = asyncio.create_task(box.run(code))
        loop = asyncio.get_running_loop()
        # The cut after the end may wait for that pool, as nothing runs any more.
        await loop.run_in_executor(_own_pool(), _wait_for_end, box)
        released.set()
        result = await run
    assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK)


def _own_pool() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1)


def _wait_for_end(box: Lab) -> None:
    running = box.manager._running
    wait_until(lambda: bool(running), what="the run to start")
    sandbox = next(iter(running.values()))._sandbox
    wait_until(lambda: not sandbox.alive, what="the end of the sandbox")


async def test_a_look_that_never_settles_counts_as_a_stall() -> None:
    ended: list[tuple[Limit, str | None]] = []
    guards = Guards(alive=lambda: not ended, end=lambda *end: ended.append(end), bound_seconds=0.2)

    def unsettled() -> None:
        raise UnsettledError

    guards.poll("disk", unsettled, every_seconds=0.01)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not ended:
                await asyncio.sleep(0.01)
    finally:
        guards.stop()
    assert [limit for limit, _ in ended] == [Limit.GUARD]


async def test_an_idle_guard_is_never_late() -> None:
    ended: list[object] = []
    guards = Guards(alive=lambda: True, end=lambda *end: ended.append(end), bound_seconds=1)
    guard: Guard = guards.add("output")
    try:
        guards.supervise(1e12)
        guard.begin()
        guard.done()
        guards.supervise(1e12)
        assert ended == []
        guard.begin()
        guards.supervise(1e12)
        assert len(ended) == 1
    finally:
        guards.stop()
