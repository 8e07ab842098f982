"""MCP servers in a fleet: declared while workers run, called from sandboxed code, killed at every place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet, build_fleet

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.extensions.mcp.follower import try_on_worker
from nekro.extensions.mcp.questions import answer_question
from nekro.extensions.mcp.servers import read_servers
from nekro.sandbox.models import StopType
from nekro.wire.values import decode_value
from nekro_agent.errors import MethodFailedError, MethodNotFoundError, OutcomeUnknownError
from nekro_agent.ports import IncomingMessage

sys.path.insert(0, str(Path(__file__).parents[1] / "connectors"))
from mcp_world import odd_entry
from odd_server import TOOLS

from nekro.extensions.mcp.rows import ServerRows

pytestmark = pytest.mark.extended

CHAT = "with-servers"


@pytest.fixture(scope="module")
def fleet(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Workers that run methods; a server is declared in the file."""
    directory = tmp_path_factory.mktemp("mcp")
    url = f"sqlite:///{directory / 'nekro.db'}"
    lease = {"lease_seconds": 6}
    broker = {"visibility_timeout_seconds": 5}
    fleet = build_fleet(
        directory, redis_server.url, url, plugins={"load_shipped": False}, agent=lease, broker=broker
    )
    data_dir = fleet.settings.data_dir
    data_dir.mkdir(parents=True, exist_ok=True)
    (data_dir / "mcp.json").write_text(
        json.dumps({"mcpServers": {"odd": odd_entry(approval=False, elicitation_seconds=120)}})
    )
    yield fleet
    fleet.stop()


@pytest.fixture
async def services(fleet: Fleet) -> AsyncIterator[Services]:
    if not fleet.workers:
        fleet.start("methods")
    services = fleet.services()
    await services.start()
    await eventually(lambda: serves(services, "mcp.odd.echo"), what=fleet.waiting_for("the tools"))
    yield services
    await services.close()


async def serves(services: Services, task: str) -> bool:
    await services.read_catalogue()
    return task in services.registry


async def call(services: Services, method: str, **arguments: Any) -> Any:
    envelope = await use_cases.invoke(
        services, method, (), arguments, chat_key=CHAT, user_id=None, timeout_seconds=WAIT_SECONDS
    )
    return decode_value(envelope.value or "", max_bytes=1 << 20)


async def trial(services: Services) -> dict[str, Any]:
    """What the owner says of the server, which is alive."""
    while True:
        try:
            found = await try_on_worker(services, "mcp.odd")
        except Exception:  # the owner has just been killed
            await asyncio.sleep(0.1)
            continue
        if found["error"] is None:
            return found


async def test_sandboxed_code_calls_tools_of_servers(fleet: Fleet, services: Services) -> None:
    code = "print(mcp.odd.echo('in code'))\n"
    code += "try:\n    fail()\nexcept MethodError as exc:\n    print('caught', exc)\n"
    report = await use_cases.run_code(
        services, code, chat_key=CHAT, user_id=None, follow_up=False, file_name="t"
    )
    assert report.stop_type is StopType.NORMAL, report
    assert "in code" in report.output and "caught" in report.output
    assert "it failed" in report.output


async def test_a_server_is_declared_changed_and_removed_while_workers_run(services: Services) -> None:
    async def put(entry: dict[str, Any]) -> None:
        async with services.database.autocommit() as transaction:
            await ServerRows(transaction.connection).put("second", entry, is_enabled=True)

    await put(odd_entry())
    # At once: the worker reads the declaration before it answers.
    assert (await try_on_worker(services, "mcp.second"))["tools"][0]["name"] == "echo"
    await put(odd_entry("crash"))
    assert "exit code 3" in (await try_on_worker(services, "mcp.second"))["error"]
    await put({"url": "http://127.0.0.1:9/mcp"})
    assert "cannot be reached" in (await try_on_worker(services, "mcp.second"))["error"]
    async with services.database.autocommit() as transaction:
        await ServerRows(transaction.connection).put("second", odd_entry(), is_enabled=False)
    assert "it is disabled" in (await try_on_worker(services, "mcp.second"))["error"]
    await put(odd_entry())
    assert (await try_on_worker(services, "mcp.second"))["error"] is None
    await eventually(lambda: serves(services, "mcp.second.echo"), what="the new server")
    assert await call(services, "mcp.second.echo", text="new") == "new"
    await put({**odd_entry(), "env": {"VERSION": "2"}})

    async def has_variable() -> bool:
        return "VERSION" in (await call(services, "mcp.second.seen"))["environment"]

    await eventually(has_variable, what="the changed declaration")

    async def is_listed() -> bool:  # beside its calls
        servers = {server.name: server for server in await read_servers(services.settings, services.database)}
        return servers["second"].is_current and len(servers["second"].tools) == len(TOOLS)

    await eventually(is_listed, what="the listing of the changed declaration")
    async with services.database.autocommit() as transaction:
        assert await ServerRows(transaction.connection).remove("second")

    async def is_gone() -> bool:
        await services.read_catalogue()
        return "mcp.second.echo" not in services.registry

    await eventually(is_gone, what="the removed server")
    with pytest.raises(MethodNotFoundError):
        await call(services, "mcp.second.echo", text="gone")


async def test_a_change_of_the_tools_reaches_all_workers(services: Services) -> None:
    await call(services, "mcp.odd.change")
    await eventually(lambda: serves(services, "mcp.odd.fresh"), what="the new tool")
    assert await call(services, "mcp.odd.fresh", text="x") == "x"


async def test_a_killed_server_is_started_again_for_the_next_call(services: Services) -> None:
    process = (await trial(services))["confinement"]["process"]
    os.kill(process, signal.SIGKILL)
    assert await call(services, "mcp.odd.echo", text="again") == "again"
    assert (await trial(services))["confinement"]["process"] != process


async def test_a_call_that_must_not_run_twice_is_unknown_after_its_server_died(services: Services) -> None:
    with pytest.raises((OutcomeUnknownError, MethodFailedError), match="may or may not have happened"):
        await call(services, "mcp.odd.die_once", always=True)


@pytest.mark.parametrize("tool", ["work", "work_once"])
async def test_a_killed_owner_is_replaced(fleet: Fleet, services: Services, tool: str) -> None:
    owner = await _owner(fleet, services)
    (other,) = fleet.start("methods")
    process = (await trial(services))["confinement"]["process"]
    mark = fleet.settings.data_dir / "mcp" / "odd" / "working"
    mark.unlink(missing_ok=True)
    running = asyncio.create_task(call(services, f"mcp.odd.{tool}", seconds=5))
    await eventually(mark.exists, what="the call on the owner")
    owner.kill()
    if tool == "work":
        assert await running == "worked"
    else:
        with pytest.raises(OutcomeUnknownError):
            await running
    assert await call(services, "mcp.odd.echo", text="next") == "next"
    assert (await _owner(fleet, services)).pid == other.pid
    await eventually(lambda: not is_running(process), what="the end of the server of the killed owner")


async def test_a_person_answers_a_question_of_a_server(fleet: Fleet, services: Services) -> None:
    running = asyncio.create_task(call(services, "mcp.odd.ask"))
    asked = await eventually(lambda: asked_of(services, set()), what=fleet.waiting_for("the question"))
    refused = await asyncio.to_thread(fleet.run, "mcp", "answer", asked, "city=Rome", "days=0")
    assert refused.returncode == 0, refused.stderr
    await eventually(lambda: texts(services, "does not fit: days: 0 is less than 1"), what="the refusal")
    line = IncomingMessage(
        chat_key=CHAT, user_id="u", user_name="U", text=f"/answer {asked} city=Rome days=3", is_tome=False
    )
    # A message that a plugin pushes, or a person of another chat, is not an answer.
    await services.intake.accept(line)
    await services.intake.accept(replace(line, chat_key="another"), issuer="test")
    await eventually(lambda: texts(services, f"Not done: no call waits for an answer to question {asked}"))
    assert not running.done()
    await services.intake.accept(line, issuer="test")
    assert json.loads(await running) == {"action": "accept", "content": {"city": "Rome", "days": 3}}
    late = await asyncio.to_thread(fleet.run, "mcp", "answer", asked, "city=Rome")
    assert late.returncode != 0 and "no call waits" in late.stderr


async def test_an_answer_counts_for_a_call_that_moved_to_another_worker(
    fleet: Fleet, services: Services
) -> None:
    owner = await _owner(fleet, services)
    fleet.start("methods")
    before = set(await questions(services))
    running = asyncio.create_task(call(services, "mcp.odd.ask"))
    asked = await eventually(lambda: asked_of(services, before), what=fleet.waiting_for("the question"))
    owner.kill()
    await answer_question(services.database, asked, {"action": "decline"})
    assert json.loads(await running) == {"action": "decline"}


async def questions(services: Services) -> list[str]:
    return [
        text.partition("(question ")[2].partition(")")[0]
        for text in await texts(services, "The MCP server odd asks")
    ]


async def asked_of(services: Services, before: set[str]) -> str | None:
    return next((one for one in await questions(services) if one not in before), None)


async def texts(services: Services, part: str) -> list[str]:
    async with services.database.read() as transaction:
        rows = await transaction.connection.exec_driver_sql("SELECT text FROM messages")
    return [row[0] for row in rows if part in row[0]]


async def test_calls_outlast_a_restart_of_redis(fleet: Fleet, services: Services, redis_server: Any) -> None:
    running = [asyncio.create_task(call(services, "mcp.odd.echo", text=str(n))) for n in range(20)]
    client = redis.Redis.from_url(redis_server.url)
    client.client_kill_filter(_type="normal")
    client.close()
    assert await asyncio.gather(*running) == [str(n) for n in range(20)]


def is_running(process: int) -> bool:
    """Whether a process has not ended; one that its new parent has not reaped yet has."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def _owner(fleet: Fleet, services: Services) -> Any:
    async def held() -> Any:
        async with services.database.read() as transaction:
            return await transaction.leases.held(prefix="pinned:mcp.odd", limit=2)

    (lease,) = await eventually(held, what="an owner")
    return fleet.worker_of(lease.owner)
