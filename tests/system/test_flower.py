"""Flower on a running fleet, through its own API."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from redis_process import free_port
from waiting import WAIT_SECONDS, eventually

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.app import use_cases
from nekro.app.services import Services
from nekro.cli.environment import environment_of
from nekro_agent.errors import MethodFailedError, NekroError

CHAT = "flower-chat"
PASSWORD = "operator:of operators"


class Flower:
    """A Flower with a password, and its API."""

    def __init__(self, settings: Settings) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nekro.cli.main", "flower", "--port", str(self.port)],
            env={**environment_of(settings), "FLOWER_BASIC_AUTH": PASSWORD},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, path: str, form: dict[str, str] | None = None, *, password: str = PASSWORD) -> Any:
        """Request the API; a form is posted. Raises ``HTTPError`` for requests that Flower refuses."""
        data = None if form is None else urllib.parse.urlencode(form).encode()
        token = base64.b64encode(password.encode()).decode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Authorization": f"Basic {token}"}
        )
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return json.load(answer)

    async def until(self, path: str, condition: Callable[[Any], bool]) -> Any:
        """Poll until the answer meets the condition."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    answer = await asyncio.to_thread(self.ask, path)
                    if condition(answer):
                        return answer
                await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database suffices: nothing here depends on it."""
    return sqlite_url


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any]) -> Any:
    here = Path(__file__).parent
    return make_fleet(plugins={"dirs": (here / "plugins", here / "slow_plugins")})


@pytest.fixture(scope="module")
def flower(fleet: Any) -> Iterator[Flower]:
    """Flower starts first: it only shows events that it has received, including workers' starts."""
    served = Flower(fleet.settings)
    try:
        fleet.start("methods", "long")
        yield served
    finally:
        served.process.terminate()
        served.process.wait(WAIT_SECONDS)


@contextlib.asynccontextmanager
async def opened(fleet: Any) -> AsyncIterator[Services]:
    services: Services = fleet.services()
    await services.start()
    try:
        yield services
    finally:
        await services.close()


async def call(services: Services, method: str, *args: Any, seconds: float = WAIT_SECONDS) -> str:
    """Call a method; returns the call's id."""
    envelope = await use_cases.invoke(
        services, method, args, {}, chat_key=CHAT, user_id="u", timeout_seconds=seconds
    )
    return str(envelope.call_id)


async def test_flower_requires_the_password(flower: Flower) -> None:
    await flower.until("/api/workers", lambda _: True)
    with pytest.raises(urllib.error.HTTPError) as refused:
        await asyncio.to_thread(flower.ask, "/api/workers", password="operator:guess")
    assert refused.value.code == 401
    refused.value.close()


async def test_flower_shows_workers_of_every_pool(flower: Flower) -> None:
    # Flower asks for each of them by itself, and waits a second for the workers.
    needed = {"stats", "registered"}
    workers = await flower.until(
        "/api/workers?refresh=1",
        lambda found: len(found) == 2 and all(needed <= info.keys() for info in found.values()),
    )
    pools = {
        name.partition("-")[0]: info["stats"]["pool"]["implementation"] for name, info in workers.items()
    }
    assert pools == {
        "methods": "workers.pools.asyncio_pool:AsyncioPool",
        "long": "workers.pools.thread_pool:ThreadPool",
    }
    registered = {task.partition(" ")[0] for info in workers.values() for task in info["registered"]}
    assert {"tests.probe.add", "tests.probe.look_up"} <= registered


async def test_flower_shows_calls_by_name_without_their_arguments(fleet: Any, flower: Flower) -> None:
    async with opened(fleet) as services:
        call_id = await call(services, "length", b"told in confidence")
    task = await flower.until(f"/api/task/info/{call_id}", lambda info: info["state"] == "SUCCESS")
    assert task["name"] == "tests.probe.length"
    assert "confidence" not in json.dumps(task) and base64.b64encode(b"told in")[
        :8
    ].decode() not in json.dumps(task)
    assert task["args"] and task["worker"].startswith("methods-")
    listed = await asyncio.to_thread(flower.ask, "/api/tasks?taskname=tests.probe.length")
    assert call_id in listed


async def test_flower_shows_a_failure_with_its_traceback_and_without_secrets(
    fleet: Any, flower: Flower
) -> None:
    async with opened(fleet) as services:
        with pytest.raises(MethodFailedError):
            await call(services, "fail_with", "test-signing-key was wrong")
    found = await flower.until(
        "/api/tasks?taskname=tests.probe.fail_with&state=FAILURE", lambda tasks: len(tasks) > 0
    )
    (task,) = found.values()
    assert "in fail_with" in task["traceback"] and "[secret] was wrong" in task["traceback"]
    assert "test-signing-key" not in json.dumps(found)


async def test_a_call_is_revoked_from_flower_while_it_runs(fleet: Any, flower: Flower) -> None:
    async with opened(fleet) as services:
        running = asyncio.create_task(call(services, "wait_long", 600))
        tasks = await flower.until(
            "/api/tasks?taskname=tests.slow.wait_long&state=STARTED", lambda found: len(found) > 0
        )
        (task_id,) = tasks
        await asyncio.to_thread(flower.ask, f"/api/task/revoke/{task_id}?terminate=true", {})
        with pytest.raises(NekroError, match=r"stopped|revoked|cancelled"):
            await running
    await flower.until(f"/api/task/info/{task_id}", lambda info: info["state"] == "REVOKED")


async def test_a_rate_limit_set_in_flower_holds(fleet: Any, flower: Flower) -> None:
    names = await flower.until("/api/workers?refresh=1", lambda found: len(found) == 2)
    (worker,) = [name for name in names if name.startswith("methods")]
    limit = {"workername": worker, "ratelimit": "1/h"}

    async def accepted() -> Any:
        """Flower started before the workers published their methods, and waits a second for their answer."""
        try:
            return await asyncio.to_thread(flower.ask, "/api/task/rate-limit/tests.probe.who", limit)
        except urllib.error.HTTPError as exc:
            assert exc.code in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN)
            return None

    said = await eventually(accepted, what="Flower to learn the workers' methods")
    assert "ok" in said["message"] or "new rate limit" in said["message"]
    async with opened(fleet) as services:
        await call(services, "who")
        with pytest.raises(NekroError, match=r"deadline|time"):
            await call(services, "who", seconds=0.7)
        await call(services, "add", 1, 2)


def test_flower_reads_no_methods_when_it_has_ended(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that the end of Python interrupts prints a traceback."""
    from nekro.cli.commands import flower

    def readers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "nekro-methods"]

    monkeypatch.setattr(flower, "_METHODS_SECONDS", 0)
    with flower.follow_methods(create_app(fleet.settings), fleet.settings):
        assert len(readers()) == 1
    assert not readers()


@pytest.mark.extended
def test_flower_sends_no_command_that_workers_refuse() -> None:
    """It had requested events from every worker every 5 seconds: an error in every log each time."""
    import flower.options  # noqa: F401 - declares the options
    from tornado.options import options

    from nekro.cli.commands.flower import flower_arguments

    before = options.as_dict()
    try:
        options.parse_command_line(flower_arguments(address="127.0.0.1", port=5555))
        assert options.enable_events is False
    finally:
        for name, value in before.items():
            if name != "help":
                setattr(options, name, value)
