"""Short runs of the harness on both databases; `make faults` runs longer ones."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worker_crew
from cut_proxy import CutProxy
from fault_caller import started
from fault_command import options_of, parse
from fault_plan import DATABASES, FaultKind, Options, call_plans, fault_schedule
from fault_run import Report, figures_of, run
from leftovers import adopting_orphans, descendants, left_over
from redis_process import free_port

from broker_config.settings import DatabaseSettings, Settings

pytestmark = pytest.mark.extended

#: Faults that need no worker start.
SHORT = (FaultKind.CUT, FaultKind.LOSE, FaultKind.REDIS_RESTART, FaultKind.REDIS_EMPTY)
DATABASE_FAULTS = (FaultKind.DB_LOCK, FaultKind.DB_AWAY, FaultKind.DB_LOSE)


def carry_out(request: pytest.FixtureRequest, directory: Path, options: Options) -> Report:
    """Run on the session's PostgreSQL, or on a new SQLite."""
    is_postgres = options.database == "postgres"
    report = run(options, directory, request.getfixturevalue("postgres_server") if is_postgres else None)
    print(*report.lines(), sep="\n")
    return report


@pytest.mark.parametrize(("database", "seed"), [("sqlite", 4), ("postgres", 2)])
def test_promises_hold_under_the_faults_of_a_seed(
    request: pytest.FixtureRequest, tmp_path: Path, database: str, seed: int
) -> None:
    options = Options(
        seed=seed, database=database, seconds=3, faults=SHORT + DATABASE_FAULTS,
        lanes=("methods",), callers=1,
    )  # fmt: skip
    report = carry_out(request, tmp_path, options)
    assert report.violations == []
    assert report.evidence.faults


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("database", DATABASES)
def test_promises_hold_for_tools_of_a_server(
    request: pytest.FixtureRequest, tmp_path: Path, database: str
) -> None:
    faults = (*SHORT, FaultKind.KILL_SERVER, FaultKind.KILL, FaultKind.STOP, FaultKind.REDIS_ROLLBACK)
    options = Options(
        seed=time.time_ns() % (1 << 32), database=database, seconds=40, faults=faults,
        lanes=("methods", "methods"), callers=1, server=True,
    )  # fmt: skip
    print(f"seed {options.seed}")
    report = carry_out(request, tmp_path, options)
    assert report.violations == []
    assert any(span.kind is FaultKind.KILL_SERVER for span in report.evidence.faults)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("database", DATABASES)
def test_promises_hold_under_all_faults(
    request: pytest.FixtureRequest, tmp_path: Path, database: str
) -> None:
    options = Options(seed=time.time_ns() % (1 << 32), database=database, seconds=60)
    print(f"seed {options.seed}")
    assert carry_out(request, tmp_path, options).violations == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", DATABASES)
def test_5000_terminated_calls_of_20000_do_not_disturb_the_others(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    database: str,
    record_property: Callable[[str, object], None],
) -> None:
    options = Options(seed=5, database=database, faults=(), calls=20_000, cancels=0.26)
    report = carry_out(request, tmp_path, options)
    figures = figures_of(report.evidence)
    record_property("figures", figures)
    given_up = [call for call in report.evidence.calls.values() if call.plan.cancel_after_seconds is not None]
    assert len(report.evidence.calls) == 20_000 + options.callers
    assert len(given_up) >= 5_000
    assert report.violations == []


def test_a_seed_determines_calls_and_faults() -> None:
    def plan(seed: int) -> tuple[Any, Any]:
        options = Options(seed=seed, database="postgres")
        calls = call_plans(options, 0)
        return fault_schedule(options), [next(calls) for _ in range(100)]

    assert plan(1) == plan(1)
    assert plan(1)[0] != plan(2)[0]
    assert plan(1)[1] != plan(2)[1]


def test_the_printed_command_repeats_a_run() -> None:
    options = Options(
        seed=7,
        database="sqlite",
        seconds=2.5,
        faults=SHORT,
        lanes=("methods",),
        cancels=0.3,
        server=True,
        methods=("work", "keep"),
    )
    words = shlex.split(options.command())
    assert words[:3] == ["python", "-m", "tests.faults"]
    assert [options] == options_of(parse(words[3:]), seed=7)


def test_processes_that_outlive_their_parents_are_found() -> None:
    leave_one = "from subprocess import *; print(Popen(['sleep', '60'], stdout=DEVNULL, stderr=DEVNULL).pid)"
    with adopting_orphans():
        before = descendants()
        done = subprocess.run([sys.executable, "-c", leave_one], capture_output=True, text=True, check=True)
        left = left_over(before, seconds=0)
        assert left == {int(done.stdout): "sleep 60 "}
        os.kill(int(done.stdout), signal.SIGKILL)
        os.waitpid(int(done.stdout), 0)
        assert left_over(before) == {}


async def test_a_worker_that_ends_before_it_is_ready_is_started_again(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_crew, "STARTS", 2)
    nobody = make_settings(database={"url": f"postgresql://nobody@127.0.0.1:{free_port()}/none"})
    crew = worker_crew.Crew(nobody, tmp_path, forks=True)
    with pytest.raises(pytest.fail.Exception, match="before it was ready"):
        await crew.start("methods")
    assert sorted(one.name for one in tmp_path.glob("methods-*.log")) == ["methods-1.log", "methods-2.log"]


async def test_a_caller_starts_when_an_outage_is_over(
    make_settings: Callable[..., Settings], migrated_copy: Callable[[str], DatabaseSettings]
) -> None:
    proxy = CutProxy(migrated_copy("postgres"))
    reached = await proxy.start()
    proxy.go_away()
    starting = asyncio.create_task(started(make_settings(database={"url": str(reached.url)})))
    await asyncio.wait({starting}, timeout=0.5)
    assert not starting.done()
    proxy.come_back()
    await (await starting).close()
    await proxy.stop()
