"""Plugins that change and are switched while workers run."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually, wait_until
from worker_fleet import Fleet, build_fleet

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.cli.running import ExitCode
from nekro.wire.values import decode_value
from nekro_agent.errors import MethodDisabledError, MethodNotFoundError

pytestmark = pytest.mark.extended

CHAT = "reloaded"

PLUGIN = '''
import asyncio
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from .words import WORD

plugin = NekroPlugin("n", "todo", "d", WORD, "Ada", "u")
journal = plugin.get_plugin_data_dir() / "journal.txt"

def note(text):
    with journal.open("a") as file:
        file.write(f"{{WORD}} {{text}}\\n")

@plugin.mount_init_method()
async def init():
    note("init")

@plugin.mount_cleanup_method()
async def cleanup():
    note("cleanup")

@plugin.on_disabled()
async def disabled():
    note("disabled")

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "version")
async def version(ctx) -> str:
    """Return the version."""
    await asyncio.sleep(0.005)
    from .words import WORD as lazily
    return f"{{WORD}} {{lazily}}"

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "wait")
async def wait(ctx, name: str) -> str:
    """Return when a file exists."""
    note("waits")
    while not (journal.parent / name).exists():
        await asyncio.sleep(0.02)
    from .words import WORD as lazily
    return f"{{WORD}} {{lazily}}"
{more}
'''
MORE = '''
@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "added")
async def added(ctx) -> str:
    """Return a text."""
    return "added"
'''


#: Plugins that fail beside the good one, in every test.
BROKEN = {
    "cancels": "import asyncio\nplugin = 1\nraise asyncio.CancelledError",
    "ends": "import sys\nplugin = 1\nsys.exit(3)",
    "lacks": "import no_such_package\nplugin = 1",
    "misses_a_key": (
        "from nekro_agent.api.plugin import NekroPlugin\n"
        "plugin = NekroPlugin('n', 'misses_a_key', 'd', '1', 'Ada', 'u')\n"
        "@plugin.mount_init_method()\nasync def init():\n    raise ValueError('no key')\n"
    ),
    "types_wrongly": "plugin = (",
}


class Todo:
    """The files of a plugin of one file, and what it wrote."""

    def __init__(self, folder: Path, data_dir: Path) -> None:
        self.path = folder / "todo.py"
        self._words = folder / "words.py"
        self.data_dir = data_dir / "plugins" / "Ada.todo"

    def write(self, word: str, more: str = "") -> None:
        self._words.write_text(f"WORD = {word!r}\n")
        self.path.write_text(PLUGIN.format(more=more))

    def journal(self) -> list[str]:
        file = self.data_dir / "journal.txt"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def todo(tmp_path: Path) -> Todo:
    folder = tmp_path / "plugins"
    folder.mkdir()
    files = Todo(folder, tmp_path / "data")
    files.write("old")
    for name, code in BROKEN.items():
        (folder / f"{name}.py").write_text(code)
    return files


@pytest.fixture
def fleet(redis_server: Any, tmp_path: Path, todo: Todo) -> Iterator[Fleet]:
    system = build_fleet(
        tmp_path,
        redis_server.url,
        f"sqlite:///{tmp_path / 'nekro.db'}",
        plugins={"dirs": (todo.path.parent,), "load_shipped": False, "reload": True},
        data_dir=todo.data_dir.parents[1],
    )
    yield system
    system.stop()


@contextlib.asynccontextmanager
async def opened(fleet: Fleet) -> AsyncIterator[Services]:
    services = fleet.services()
    await services.start()
    try:
        yield services
    finally:
        await services.close()


async def call(services: Services, method: str, *args: Any) -> object:
    envelope = await use_cases.invoke(
        services, method, args, {}, chat_key=CHAT, user_id="u1", timeout_seconds=WAIT_SECONDS
    )
    return decode_value(envelope.value_bytes(), max_bytes=1 << 20)


async def is_served(services: Services, method: str) -> bool:
    """Whether the catalogue offers a method."""
    try:
        await services.find_method(method)
    except (MethodNotFoundError, MethodDisabledError):
        return False
    return True


async def test_calls_during_a_reload_all_succeed_on_the_old_or_the_new_code(fleet: Fleet, todo: Todo) -> None:
    workers = fleet.start("methods", "methods")
    async with opened(fleet) as services:
        answers: list[object] = []
        slots = asyncio.Semaphore(8)
        is_over = asyncio.Event()

        async def caller() -> None:
            while not is_over.is_set():
                async with slots:
                    answers.append(await call(services, "version"))

        callers = [asyncio.create_task(caller()) for _ in range(8)]
        await eventually(lambda: len(answers) > 50)
        todo.write("new", MORE)
        await eventually(lambda: todo.journal().count("old cleanup") == 2)
        before = len(answers) + len(callers)  # the old code may have answered those that are under way
        await eventually(lambda: len(answers) > before + 200)
        is_over.set()
        await asyncio.gather(*callers)
        assert set(answers) == {"old old", "new new"}
        assert set(answers[before:]) == {"new new"}
        journal = todo.journal()
        assert (journal.count("new init"), journal.count("old init")) == (2, 2)
        # Callers read what the workers publish.
        await eventually(lambda: is_served(services, "added"))
        for _ in range(10):
            assert await call(services, "added") == "added"
    assert [worker.process.poll() for worker in workers] == [None, None]


async def test_a_running_call_ends_on_the_version_on_which_it_began(fleet: Fleet, todo: Todo) -> None:
    fleet.start("methods")
    async with opened(fleet) as services:
        name = uuid.uuid4().hex
        waiting = asyncio.create_task(call(services, "wait", name))
        await eventually(lambda: "old waits" in todo.journal())
        todo.write("new")
        await eventually(lambda: "new init" in todo.journal())
        await until(services, "new new")
        assert "old cleanup" not in todo.journal()
        (todo.data_dir / name).touch()
        assert await waiting == "old old"
        await eventually(lambda: "old cleanup" in todo.journal())


async def until(services: Services, answer: str) -> None:
    async def is_answered() -> bool:
        with contextlib.suppress(MethodDisabledError):
            return await call(services, "version") == answer
        return False

    await eventually(is_answered)


async def test_a_version_that_cannot_be_used_changes_nothing(fleet: Fleet, todo: Todo) -> None:
    (worker,) = fleet.start("methods")
    async with opened(fleet) as services:
        todo.path.write_text(PLUGIN.format(more="def broken(:"))
        await eventually(lambda: "SyntaxError" in worker.log.read_text())
        assert await call(services, "version") == "old old"
        todo.write(
            "failing", "@plugin.mount_init_method()\nasync def fail():\n    raise ValueError('no new key')"
        )
        await eventually(lambda: "no new key" in worker.log.read_text())
        assert await call(services, "version") == "old old"
        todo.path.write_text(PLUGIN.format(more="").replace('"todo"', '"other"'))
        await eventually(lambda: "its key is now Ada.other" in worker.log.read_text())
        assert await call(services, "version") == "old old"
        todo.write("good")
        await until(services, "good good")
        repaired = PLUGIN.format(more="").replace('"todo"', '"ends"').replace("version", "repaired")
        (todo.path.parent / "ends.py").write_text(repaired)
        await eventually(lambda: "plugin_reloaded plugin=Ada.ends" in worker.log.read_text())
    async with opened(fleet) as services:
        await eventually(lambda: is_served(services, "repaired"))
        assert await call(services, "repaired") == "good good"
    assert "failing cleanup" in todo.journal()


#: Its hook pins it.
PINNED = """
@plugin.on_enabled()
async def enabled():
    note("enabled")
    async def tick():
        try:
            while True:
                note("enabled tick")
                await asyncio.sleep(0.02)
        finally:
            note("enabled cancelled")
    asyncio.create_task(tick())

@plugin.mount_init_method()
async def count():
    note("init")
    async def tick():
        try:
            while True:
                note("tick")
                await asyncio.sleep(0.02)
        finally:
            note("cancelled")
    asyncio.create_task(tick())
"""
#: Its hook takes longer than a worker leaves decisions unread.
SLOWLY_ENABLED = """
@plugin.on_enabled()
async def enabled_slowly():
    note("enabled slowly")
    await asyncio.sleep(2.5)
"""
JOBS = """
from nekro_agent.api.plugin import TaskCtl, task

@plugin.mount_async_task("work")
async def work(handle, name):
    note("works")
    while not (journal.parent / name).exists():
        await asyncio.sleep(0.02)
    note("worked")
    yield TaskCtl.success("done")

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "begin")
async def begin(ctx, name: str) -> str:
    \"\"\"Start a job.\"\"\"
    await task.start("work", name, ctx.chat_key, plugin, name)
    return "begun"
"""


async def test_a_pinned_plugin_is_reloaded_in_its_owner_and_its_loop_exists_once(
    fleet: Fleet, todo: Todo
) -> None:
    todo.write("old", PINNED)
    fleet.start("methods", "methods")
    await eventually(lambda: {"old tick", "old enabled tick"} <= set(todo.journal()))
    async with opened(fleet) as services:
        assert await call(services, "version") == "old old"
        todo.write("new", PINNED)
        await until(services, "new new")
        await eventually(lambda: {"new tick", "new enabled tick", "old cleanup"} <= set(todo.journal()))
    journal = todo.journal()
    assert not {"old tick", "old enabled tick"} & set(journal[journal.index("new init") :])
    words = ("old enabled", "new init", "old cancelled", "old cleanup", "new enabled")
    assert [journal.count(word) for word in words] == [1, 1, 1, 1, 1]


async def test_a_pinned_plugin_is_switched_in_its_owner(fleet: Fleet, todo: Todo) -> None:
    todo.write("old", PINNED)
    run_command(fleet, "plugins", "disable", "Ada.todo")
    fleet.start("methods", "methods")
    await eventually(lambda: "old disabled" in todo.journal())
    assert "old init" not in todo.journal()
    run_command(fleet, "plugins", "enable", "Ada.todo")
    await eventually(lambda: "old enabled" in todo.journal())
    run_command(fleet, "plugins", "disable", "Ada.todo")
    await eventually(lambda: {"old cancelled", "old enabled cancelled"} <= set(todo.journal()))
    await eventually(lambda: todo.journal().count("old disabled") == 2)
    run_command(fleet, "plugins", "enable", "Ada.todo")
    await eventually(lambda: todo.journal().count("old enabled") == 2)
    async with opened(fleet) as services:
        await until(services, "old old")
    journal = todo.journal()
    counts = {word: journal.count(f"old {word}") for word in ("init", "enabled", "disabled", "cancelled")}
    assert counts == {"init": 2, "enabled": 2, "disabled": 2, "cancelled": 1}


async def test_hooks_of_a_decision_run_once_while_an_owner_starts_the_plugin(
    fleet: Fleet, todo: Todo
) -> None:
    todo.write("old", SLOWLY_ENABLED)
    run_command(fleet, "plugins", "disable", "Ada.todo")
    fleet.start("methods")
    run_command(fleet, "plugins", "enable", "Ada.todo")
    async with opened(fleet) as services:
        await until(services, "old old")
    assert todo.journal().count("old enabled slowly") == 1


async def test_a_running_job_ends_on_its_version_and_the_next_one_runs_on_the_new(
    fleet: Fleet, todo: Todo
) -> None:
    todo.write("old", JOBS)
    fleet.start("methods", "long")
    async with opened(fleet) as services:
        await call(services, "begin", "first")
        await eventually(lambda: "old works" in todo.journal())
        todo.write("new", JOBS)
        await eventually(lambda: todo.journal().count("new init") == 2)
        await until(services, "new new")
        await eventually(lambda: "old cleanup" in todo.journal())
        await call(services, "begin", "second")
        await eventually(lambda: "new works" in todo.journal())
        assert todo.journal().count("old cleanup") == 1  # in the methods worker
        for name in ("first", "second"):
            (todo.data_dir / name).touch()
        await eventually(lambda: {"old worked", "new worked"} <= set(todo.journal()))
        await eventually(lambda: todo.journal().count("old cleanup") == 2)


async def test_a_worker_whose_plugins_fail_serves_the_others(fleet: Fleet, todo: Todo) -> None:
    (worker,) = fleet.start("methods")
    for reason in (
        "cancels.py",
        "ends.py",
        "No module named 'no_such_package'",
        "no key",
        "types_wrongly.py",
    ):
        assert reason in worker.log.read_text()
    async with opened(fleet) as services:
        assert await call(services, "version") == "old old"


async def test_plugins_are_disabled_and_enabled_in_the_whole_fleet_while_it_runs(
    fleet: Fleet, todo: Todo
) -> None:
    fleet.start("methods", "methods", "long")
    async with opened(fleet) as services:
        assert await call(services, "version") == "old old"

        async def is_disabled() -> bool:
            try:
                await call(services, "version")
            except MethodDisabledError:
                return True
            return False

        run_command(fleet, "plugins", "disable", "Ada.todo")
        await eventually(lambda: todo.journal().count("old cleanup") == 3)
        assert await is_disabled() and await is_disabled()
        await eventually(lambda: todo.journal().count("old disabled") == 1)

        def is_listed() -> bool:
            listed = run_command(fleet, "plugins", "list", code=ExitCode.PLUGIN)
            return re.search(r"^Ada\.todo +disabled", listed, re.MULTILINE) is not None

        # A worker publishes what it serves after the plugin's own clean-up.
        wait_until(is_listed, what="the list to show that the plugin is disabled")
        fleet.start("methods")
        assert todo.journal().count("old init") == 3
        run_command(fleet, "plugins", "enable", "Ada.todo")
        await eventually(lambda: todo.journal().count("old init") == 7)
        await eventually(lambda: is_served(services, "version"))
        for _ in range(20):
            assert await call(services, "version") == "old old"
    assert todo.journal().count("old disabled") == 1


def run_command(fleet: Fleet, *arguments: str, code: int = ExitCode.OK) -> str:
    process = fleet.command(*arguments)
    out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == code, err
    return f"{out}{err}"
