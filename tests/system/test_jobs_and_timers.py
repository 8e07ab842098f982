"""Background jobs and timers on real workers that are killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually
from worker_fleet import imported, plugin_of

from nekro.app import use_cases
from nekro.app.services import Services
from nekro_agent import runtime
from nekro_agent.api import timer
from nekro_agent.api.plugin import NekroPlugin, TaskCtl, TaskSignal, task
from nekro_agent.ports import JobState
from storage.repositories.jobs import Job
from storage.states import RoundState

pytestmark = pytest.mark.extended

PLUGINS = Path(__file__).parent / "job_plugins"
#: Shorter than some of the jobs here, whose messages are therefore redelivered while they run.
VISIBILITY_SECONDS = 3
SCRIPT = """
- when: '.'
  answer: |
    ```python
    send_msg_text(_ck, "noted")
    ```
"""


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def database_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database of each kind; ``tests/runtime`` checks the same promises on both."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path_factory.mktemp('db') / 'nekro.db'}"
    url: str = request.getfixturevalue("postgres_server").create_database()
    return url


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = tmp_path_factory.mktemp("llm") / "script.yaml"
    script.write_text(SCRIPT)
    system = make_fleet(
        plugins={"dirs": (PLUGINS,)},
        llm={"script": script},
        agent={"lease_seconds": 6},
        workers={"drain_seconds": 0.5},
        broker={"visibility_timeout_seconds": VISIBILITY_SECONDS},
    )
    system.start("methods", "long", "long", "rounds", "rounds", concurrency=2)
    return system


@pytest.fixture
async def services(fleet: Any) -> AsyncIterator[Services]:
    services = fleet.services()
    await services.start()
    imported(services)  # binds the SDK, which the tests use as plugins do
    yield services
    await services.close()
    runtime.unbind()


def errands_of(services: Services) -> NekroPlugin:
    return plugin_of(services, "tests.errands")


def journal(services: Services, name: str) -> list[list[str]]:
    """Journal lines of jobs with that name: the words of each, without the name."""
    path = errands_of(services).get_plugin_data_dir() / "journal.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1:] for line in lines if line.split()[0] == name]


async def newest(services: Services, type_: str, name: str) -> Job:
    async with services.database.read() as tx:
        job = await tx.jobs.find_latest("tests.errands", type_, name)
    assert job is not None
    return job


async def worker_of(fleet: Any, services: Services, name: str) -> Any:
    """Wait until the job's first step; returns its worker."""

    async def first_step() -> list[list[str]]:
        return journal(services, name)

    (line, *_) = await eventually(first_step, what=fleet.waiting_for(f"{name} to begin"))
    (worker,) = [worker for worker in fleet.workers if worker.process.pid == int(line[-1])]
    return worker


async def kill_worker_of(fleet: Any, services: Services, name: str) -> None:
    """Wait until the job's first step, then kill its worker and start another."""
    (await worker_of(fleet, services, name)).kill()
    fleet.start("long", concurrency=2)


async def test_job_whose_worker_is_killed_is_restarted_and_ends_once(fleet: Any, services: Services) -> None:
    terminals: list[TaskCtl] = []
    handle = await task.start("walk", "killed", "jobs", errands_of(services), 2, on_terminal=terminals.append)
    await kill_worker_of(fleet, services, "killed")

    async def second_start() -> bool:
        return len(journal(services, "killed")) == 2

    await eventually(second_start, what=fleet.waiting_for("the second start"))
    assert handle.notify("go 0") and handle.notify("go 1")

    async def last_state() -> list[TaskCtl]:
        return terminals

    (last,) = await eventually(last_state, what=fleet.waiting_for("the end"))
    assert last == TaskCtl.success("arrived", data={"steps": 2})
    words = [line[:-1] for line in journal(services, "killed")]
    assert words == [["step", "0"], ["step", "0"], ["step", "1"], ["end"]]
    job = await newest(services, "walk", "killed")
    assert (job.state, job.attempt, job.percent) == (JobState.SUCCEEDED, 2, 100)
    async with services.database.read() as tx:
        chat_texts = [message.text for message in await tx.messages.newest("jobs", limit=9)]
    assert chat_texts == ["killed walked"]


@pytest.mark.slow
async def test_job_much_longer_than_the_visibility_timeout_runs_once(fleet: Any, services: Services) -> None:
    handle = await task.start("walk", "long", "jobs", errands_of(services), 1)
    await worker_of(fleet, services, "long")
    await asyncio.sleep(4 * VISIBILITY_SECONDS)
    handle.notify("go 0")

    async def ended() -> bool:
        return not task.is_running("walk", "long")

    await eventually(ended, what=fleet.waiting_for("the end"))
    assert [line[:-1] for line in journal(services, "long")] == [["step", "0"], ["end"]]
    assert (await newest(services, "walk", "long")).attempt == 1


async def test_job_of_a_stopped_worker_continues_on_another(fleet: Any, services: Services) -> None:
    handle = await task.start("walk", "moved", "jobs", errands_of(services), 1)
    worker = await worker_of(fleet, services, "moved")
    assert await asyncio.to_thread(worker.stop) == 0

    async def second_start() -> bool:
        return len(journal(services, "moved")) == 2

    await eventually(second_start, what=fleet.waiting_for("the second start"))
    assert handle.notify("go 0")

    async def ended() -> bool:
        return not task.is_running("walk", "moved")

    await eventually(ended, what=fleet.waiting_for("the end"))
    job = await newest(services, "walk", "moved")
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 2)
    fleet.start("long", concurrency=2)


async def test_job_that_must_not_restart_fails_with_its_worker_and_wakes_the_agent(
    fleet: Any, services: Services
) -> None:
    await task.start("pay", "once", "payments", errands_of(services))
    await kill_worker_of(fleet, services, "once")

    async def answered() -> bool:
        async with services.database.read() as tx:
            rounds = await tx.rounds.newest("payments", limit=9)
        return [round_.state for round_ in rounds] == [RoundState.DONE]

    await eventually(answered, what=fleet.waiting_for("the agent's round"))
    state = task.get_state("pay", "once")
    assert state is not None and state.signal is TaskSignal.FAIL and "worker died" in state.message
    assert len(journal(services, "once")) == 1


async def test_job_is_started_by_a_method_shown_by_celery_and_cancelled_by_another_process(
    fleet: Any, services: Services
) -> None:
    await use_cases.invoke(
        services, "begin_walk", ("far", 3), {}, chat_key="jobs", user_id=None, timeout_seconds=WAIT_SECONDS
    )

    async def shown() -> bool:
        job = await newest(services, "walk", "far")
        found = services.app.AsyncResult(job.id)
        return (found.state, found.info) == ("PROGRESS", {"percent": 0, "message": "step 0"})

    await eventually(shown, what=fleet.waiting_for("Celery's state"))
    handle = task.get_handle("walk", "far")
    assert handle is not None and handle.notify("go 0")

    async def second_step() -> bool:
        return (await newest(services, "walk", "far")).message == "step 1"

    await eventually(second_step, what=fleet.waiting_for("the second step"))
    assert await task.cancel("walk", "far")

    async def ended() -> bool:
        return not task.is_running("walk", "far")

    await eventually(ended, what=fleet.waiting_for("the end"))
    assert (await newest(services, "walk", "far")).state is JobState.CANCELLED
    assert ["end"] not in [line[:-1] for line in journal(services, "far")]


async def test_progress_of_a_call_is_a_row_among_the_jobs(fleet: Any, services: Services) -> None:
    call = asyncio.create_task(
        use_cases.invoke(
            services, "fetch_slowly", (), {}, chat_key="jobs", user_id=None, timeout_seconds=WAIT_SECONDS
        )
    )

    async def row() -> Job | None:
        async with services.database.read() as tx:
            jobs = await tx.jobs.newest(limit=50)
        return next((job for job in jobs if job.type == "fetch_slowly"), None)

    job = await eventually(row, what=fleet.waiting_for("the row"))
    assert (job.state, job.percent, job.message) == (JobState.RUNNING, 42, "fetching")
    assert not any(key.startswith("fetch_slowly") for key in task.get_running_tasks())
    await errands_of(services).store.set(store_key="enough", value="1")
    envelope = await call
    assert envelope.call_id == job.id

    async def ended() -> bool:
        found = await row()
        return found is not None and found.state is JobState.SUCCEEDED

    await eventually(ended, what=fleet.waiting_for("the row to end"))


async def test_timer_fires_once_with_two_sweepers(fleet: Any, services: Services) -> None:
    # Whole seconds, and a moment for the call itself.
    due = int(time.time()) + 5
    assert await timer.set_timer("tea", due, "pour the tea")
    assert await timer.set_timer("tea", due + 1, "drink the tea")

    async def answered() -> bool:
        async with services.database.read() as tx:
            rounds = await tx.rounds.newest("tea", limit=9)
        return len(rounds) == 2 and all(round_.finished_at is not None for round_ in rounds)

    await eventually(answered, what=fleet.waiting_for("both timers"))
    async with services.database.read() as tx:
        texts = [message.text for message in await tx.messages.newest("tea", limit=9)]
    assert [text for text in texts if text != "noted"] == ["pour the tea", "drink the tea"]
    assert await timer.get_timers("tea") == []
