"""The catalogue: commands and hosts without plugins use what the workers publish."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from waiting import wait_until
from worker_fleet import Fleet

from nekro.app import use_cases
from nekro.app.catalogue import CatalogueReader, FleetCatalogue
from nekro.cli.running import ExitCode
from nekro_agent.errors import ArgumentError, MethodNotFoundError
from storage.engine import Database

#: What differs between databases is tested in tests/storage/test_storage_catalogue.py.
pytestmark = [pytest.mark.extended, pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)]

TODO = '''
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("Todo", "todo", "", "{version}", "Ada", "")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "todo_version")
async def todo_version(_ctx: AgentCtx{parameter}) -> str:
    """Return the version."""
    return "{version}"


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "note_it")
async def note_it(_ctx: AgentCtx, text: str, *, times: int = 1) -> str:
    """Note a text."""
    return text * times


@plugin.mount_command("todo", description="Shows the list")
async def todo(context):
    return "nothing to do"


@plugin.mount_on_user_message()
async def on_user_message(_ctx: AgentCtx, message):
    from nekro_agent.api.signal import MsgSignal

    message.content_text = message.content_text.replace("hullo", "hello")
    return MsgSignal.BLOCK_ALL if "secret" in message.content_text else MsgSignal.CONTINUE


@plugin.mount_collect_methods()
async def collect(_ctx: AgentCtx):
    return [todo_version] if _ctx.chat_key == "narrow" else [todo_version, note_it]
'''


def write_todo(folder: Path, *, version: str, parameter: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "todo.py").write_text(TODO.replace("{version}", version).replace("{parameter}", parameter))
    return folder


def with_dirs(fleet: Fleet, *folders: Path) -> Any:
    plugins = fleet.settings.plugins.model_copy(update={"dirs": folders})
    return fleet.settings.model_copy(update={"plugins": plugins})


def catalogue_of(fleet: Fleet) -> FleetCatalogue:
    async def read() -> FleetCatalogue:
        database = Database(fleet.settings.database, fleet.settings.data_dir)
        try:
            return await CatalogueReader(database).read()
        finally:
            await database.dispose()

    return asyncio.run(read())


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet]) -> Iterator[Fleet]:
    """A fleet of its own, on a database that another test of this module may have used."""
    fleet = make_fleet(agent={"lease_seconds": 6})
    yield fleet
    fleet.stop()


@pytest.fixture
def bare_host(fleet: Fleet, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs commands on a host that has broker, database and key of the fleet, and no plugin."""
    variables = {
        "NEKRO_DATA_DIR": str(tmp_path / "bare"),
        "NEKRO_PLUGINS__DIRS": "",
        "NEKRO_PLUGINS__LOAD_SHIPPED": "false",
    }
    return lambda *arguments: fleet.run(*arguments, variables=variables, cwd=tmp_path)


def test_a_host_without_plugins_calls_executes_and_lists(
    fleet: Fleet, bare_host: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    todo = write_todo(tmp_path / "todo", version="1")
    fleet.start("methods", settings=with_dirs(fleet, todo))
    called = bare_host("call", "todo_version", "--json")
    assert called.returncode == 0, called.stderr
    assert json.loads(called.stdout)["value"] == "1"
    listed = bare_host("methods", "todo", "--json")
    assert [(m["task"], m["signature"]) for m in json.loads(listed.stdout)] == [
        ("Ada.todo.todo_version", "() -> str"),
        ("Ada.todo.note_it", "(text: str, *, times: int = 1) -> str"),
    ]
    plugins = json.loads(bare_host("plugins", "--json").stdout)
    assert {p["key"]: (p["status"], p["version"]) for p in plugins}["Ada.todo"] == ("ok", "1")
    assert {"path", "error", "placeholders"} < plugins[0].keys()
    assert "/todo" in bare_host("command").stdout
    ran = bare_host("command", "c", "/todo")
    assert ran.stdout == "nothing to do\n", ran.stderr
    (tmp_path / "code.py").write_text("print(todo_version(), note_it('x', times=2))")
    executed = bare_host("exec", "code.py", "--no-follow-up")
    assert (executed.returncode, executed.stdout) == (0, "1 xx\n"), executed.stderr


def test_hooks_of_messages_and_of_the_choice_of_methods_run_on_a_worker(
    fleet: Fleet, bare_host: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    todo = write_todo(tmp_path / "todo", version="1")
    fleet.start("methods", settings=with_dirs(fleet, todo))
    blocked = bare_host("send", "c", "a secret", "--json")
    assert "hook blocks messages" in blocked.stdout + blocked.stderr
    sent = bare_host("send", "c", "hullo")
    assert sent.returncode == 0, sent.stderr
    history = json.loads(bare_host("history", "c", "--json").stdout)
    assert [message["text"] for message in history] == ["hello"]
    (tmp_path / "code.py").write_text("print('note_it' in globals(), todo_version())")
    narrow = bare_host("exec", "code.py", "--chat-key", "narrow")
    assert narrow.stdout == "False 1\n", narrow.stderr


async def test_wrong_names_and_arguments_are_refused_before_anything_is_sent(
    fleet: Fleet, redis_server: Any, tmp_path: Path
) -> None:
    todo = write_todo(tmp_path / "todo", version="1", parameter=", of: str = ''")
    # The worker of another lane publishes the methods too; no worker would receive a message.
    await asyncio.to_thread(fleet.start, "long", settings=with_dirs(fleet, todo))
    services = fleet.services()
    await services.start()

    def queued() -> list[bytes]:
        with redis.Redis.from_url(redis_server.url) as client:
            return cast("list[bytes]", client.lrange(f"{fleet.settings.broker.key_prefix}methods", 0, -1))

    async def recorded() -> int:
        async with services.database.read() as transaction:
            rows = await transaction.connection.exec_driver_sql("SELECT count(*) FROM calls")
            return int(rows.scalar_one())

    before = await recorded()
    options: Any = {"chat_key": "c", "user_id": None, "timeout_seconds": 30.0}
    try:
        with pytest.raises(MethodNotFoundError, match="did you mean todo_version"):
            await use_cases.invoke(services, "todo_versio", (), {}, **options)
        for args, kwargs, words in (
            ((), {}, "note_it(text: str, *, times: int = 1) -> str: missing a required argument: 'text'"),
            (("a", 2), {}, "too many positional arguments"),
            (("a",), {"tims": 2}, "got an unexpected keyword argument 'tims'"),
            (("a",), {"text": "b"}, "multiple values for argument 'text'"),
        ):
            with pytest.raises(ArgumentError) as caught:
                await use_cases.invoke(services, "note_it", args, kwargs, **options)
            assert words in str(caught.value)
        assert queued() == []
        code = "try:\n    note_it()\nexcept TypeError as exc:\n    print(exc)"
        report = await use_cases.run_code(
            services, code, chat_key="c", user_id=None, follow_up=False, file_name="code.py"
        )
        assert "missing a required argument: 'text'" in report.output
        assert await recorded() == before
    finally:
        await services.close()
    # The hook that selects the methods was sent, and no worker received it.
    assert not any(b"note_it" in message for message in queued())


def test_workers_with_older_files_are_named_and_callers_see_the_newest(fleet: Fleet, tmp_path: Path) -> None:
    old, new = (write_todo(tmp_path / name, version=name) for name in ("old", "new"))
    fleet.start("methods", "long", settings=with_dirs(fleet, old))
    fleet.start("methods", settings=with_dirs(fleet, new))
    listed = fleet.run("plugins", "--json")
    assert [p["version"] for p in json.loads(listed.stdout) if p["key"] == "Ada.todo"] == ["new"]
    for command in ("plugins", "methods", "doctor"):
        shown = fleet.run(command)
        assert "2 of 3 workers run an older todo.py (Ada.todo" in shown.stdout + shown.stderr, command


def test_a_plugin_that_fails_on_a_worker_is_published_as_failed_and_the_others_work(
    fleet: Fleet, tmp_path: Path
) -> None:
    folder = write_todo(tmp_path / "mixed", version="1")
    (folder / "broken.py").write_text("plugin = 1 / 0")
    fleet.start("methods", settings=with_dirs(fleet, folder))
    listed = fleet.run("plugins", "--json")
    assert listed.returncode == ExitCode.PLUGIN
    status = {p["key"]: (p["status"], p["error"]) for p in json.loads(listed.stdout)}
    assert status["broken"] == ("failed", "broken.py, line 1: ZeroDivisionError: division by zero")
    assert status["Ada.todo"] == ("ok", None)
    called = fleet.run("call", "todo_version")
    assert called.stdout == "1\n" and "not loaded: broken" in called.stderr


def test_a_stopped_worker_leaves_at_once_a_dead_one_ages_out_and_the_last_catalogue_stays(
    fleet: Fleet, tmp_path: Path
) -> None:
    first, second = (write_todo(tmp_path / name, version=name) for name in ("first", "second"))
    (stopped,) = fleet.start("methods", settings=with_dirs(fleet, first))
    (killed,) = fleet.start("methods", settings=with_dirs(fleet, second))
    assert len(catalogue_of(fleet).workers) == 2
    stopped.stop()
    (left,) = catalogue_of(fleet).workers
    assert left.pid == killed.pid
    killed.kill()
    wait_until(lambda: not catalogue_of(fleet).is_live, what="the dead worker's lease to end")
    listed = fleet.run("methods", "todo", "--json")
    assert [m["name"] for m in json.loads(listed.stdout)] == ["todo_version", "note_it"]
    assert "no worker is running; this is what the last ones served" in listed.stderr
    refused = fleet.run("call", "todo_version")
    assert refused.returncode == ExitCode.SERVICE
    assert "no worker serves lane methods; start `nekro worker --lane methods`" in refused.stderr
    assert fleet.run("mcp", "add", "clock", "--command", sys.executable).returncode == 0
    untried = fleet.run("mcp", "test", "clock")
    assert untried.returncode == ExitCode.SERVICE
    assert "no worker serves lane methods; start `nekro worker --lane methods`" in untried.stderr
    # Later tests have this database, and a worker that loses the server's pinned plugin ends.
    assert fleet.run("mcp", "remove", "clock").returncode == 0
    # The next worker deletes what they left.
    fleet.start("long", settings=with_dirs(fleet, first))
    (only,) = catalogue_of(fleet).workers
    assert only.lane == "long"


def test_a_suspended_worker_comes_back_into_the_catalogue(fleet: Fleet, tmp_path: Path) -> None:
    todo = write_todo(tmp_path / "todo", version="1")
    (frozen,) = fleet.start("methods", settings=with_dirs(fleet, todo))
    frozen.freeze()
    wait_until(lambda: not catalogue_of(fleet).is_live, what="the suspended worker's lease to end")
    fleet.start("long", settings=with_dirs(fleet, todo))  # deletes the rows of the suspended one
    assert [worker.lane for worker in catalogue_of(fleet).workers] == ["long"]
    frozen.thaw()
    wait_until(
        lambda: len(catalogue_of(fleet).workers) == 2,
        what=fleet.waiting_for("the suspended worker to publish again"),
    )
