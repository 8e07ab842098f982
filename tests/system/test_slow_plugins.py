"""Plugins whose import or init takes long, on running workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet, build_fleet

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.plugins.entries import PluginStatus
from nekro.wire.values import decode_value
from nekro_agent.errors import MethodNotFoundError

pytestmark = pytest.mark.extended

PLUGIN = """
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin("n", "{name}", "d", "1", "Ada", "u")

@plugin.mount_init_method()
async def init():
    with open({journal!r}, "a") as file:
        file.write("{name}\\n")

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "{name}")
async def {name}(ctx) -> str:
    \"\"\"Return the name.\"\"\"
    return "{name}"
"""
#: Waits until files exist: every import but the first one of all processes waits for the second file too.
SLOW = """
import os
import pathlib
import time

folder = pathlib.Path({folder!r})

def wait(name):
    while not (folder / name).exists():
        time.sleep(0.01)

wait("go")
try:
    os.mkdir(folder / "first")
except FileExistsError:
    wait("go-second")
"""


#: Its init waits for a file.
SLOW_INIT = """
import asyncio
import pathlib
import time
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin("n", "slow_init", "d", "1", "Ada", "u")
folder = pathlib.Path({folder!r})

def note(text):
    with (folder / "journal").open("a") as file:
        file.write(text + "\\n")

@plugin.mount_init_method()
{init}

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "initialised")
async def initialised(ctx) -> str:
    \"\"\"Return a word.\"\"\"
    return "initialised"
"""
INITS = {
    "a coroutine": """
async def init():
    note("begin")
    while not (folder / "go-init").exists():
        await asyncio.sleep(0.01)
    note("end")
""",
    "a function": """
def init():
    note("begin")
    while not (folder / "go-init").exists():
        time.sleep(0.01)
    note("end")
""",
}


class World:
    """Workers with a quick and a slow plugin."""

    def __init__(self, fleet: Fleet, folder: Path, plugins: Path) -> None:
        self.fleet, self.folder, self.plugins = fleet, folder, plugins

    def inits(self) -> list[str]:
        file = self.folder / "journal"
        return sorted(file.read_text().split()) if file.exists() else []


@pytest.fixture
def world(redis_server: Any, tmp_path: Path) -> Iterator[World]:
    plugins, folder = tmp_path / "plugins", tmp_path / "files"
    plugins.mkdir()
    folder.mkdir()
    journal = str(folder / "journal")
    slow = SLOW.format(folder=str(folder)) + PLUGIN.format(name="slow", journal=journal)
    (plugins / "a_slow.py").write_text(slow)
    (plugins / "b_quick.py").write_text(PLUGIN.format(name="quick", journal=journal))
    fleet = build_fleet(
        tmp_path,
        redis_server.url,
        f"sqlite:///{tmp_path / 'nekro.db'}",
        plugins={"dirs": (plugins,), "load_shipped": False, "start_seconds": 3},
    )
    yield World(fleet, folder, plugins)
    for name in ("go", "go-second", "go-init"):
        (folder / name).touch()
    fleet.stop()


@contextlib.asynccontextmanager
async def opened(fleet: Fleet) -> AsyncIterator[Services]:
    services = fleet.services()
    await services.start()
    try:
        yield services
    finally:
        await services.close()


async def serves(services: Services, method: str) -> bool:
    await services.read_catalogue()
    return method in services.registry


async def call(services: Services, method: str) -> object:
    envelope = await use_cases.invoke(
        services, method, (), {}, chat_key="slow", user_id="u1", timeout_seconds=WAIT_SECONDS
    )
    return decode_value(envelope.value_bytes(), max_bytes=1 << 20)


async def test_a_slow_import_delays_no_other_plugin_and_is_taken_up_later(world: World) -> None:
    world.fleet.start("methods")
    async with opened(world.fleet) as services:
        await eventually(lambda: serves(services, "quick"), what="the quick plugin")
        assert await call(services, "quick") == "quick"
        (waiting,) = [entry for entry in (await services.read_catalogue()).plugins if entry.key == "a_slow"]
        assert waiting.status is PluginStatus.STARTING
        assert waiting.error is not None
        assert "takes longer than 3 s" in waiting.error
        with pytest.raises(MethodNotFoundError):
            await services.find_method("slow")
        assert world.inits() == ["quick"]
        (world.folder / "go").touch()

        async def is_loaded() -> bool:
            entries = (await services.read_catalogue()).plugins
            return {entry.key: entry.status for entry in entries} == {
                "Ada.slow": PluginStatus.OK,
                "Ada.quick": PluginStatus.OK,
            }

        await eventually(is_loaded, what=lambda: f"the slow plugin; {world.inits()}")
        assert await call(services, "slow") == "slow"
    assert world.inits() == ["quick", "slow"]


async def test_a_call_waits_for_a_worker_that_has_imported_its_plugin(world: World) -> None:
    """A worker that imports the plugin still must not answer that there is no such method."""
    world.fleet.start("methods", "methods")
    (world.folder / "go").touch()
    async with opened(world.fleet) as services:
        await eventually(lambda: serves(services, "slow"))
        assert "slow" in world.inits()
        assert world.inits().count("slow") == 1
        calls = [asyncio.create_task(call(services, "slow")) for _ in range(40)]
        assert await asyncio.gather(*calls) == ["slow"] * 40
        (world.folder / "go-second").touch()
        await eventually(lambda: world.inits().count("slow") == 2)
        assert await call(services, "slow") == "slow"


@pytest.mark.parametrize("kind", INITS)
async def test_a_slow_init_delays_no_other_plugin_and_its_calls_wait_for_it(world: World, kind: str) -> None:
    for name in ("go", "go-second"):
        (world.folder / name).touch()
    slow = SLOW_INIT.format(folder=str(world.folder), init=INITS[kind])
    (world.plugins / "c_init.py").write_text(slow)
    world.fleet.start("methods", "methods")
    async with opened(world.fleet) as services:
        assert await call(services, "quick") == "quick"

        async def waiting() -> bool:
            entries = {entry.key: entry for entry in (await services.read_catalogue()).plugins}
            found = entries.get("Ada.slow_init")
            return (
                found is not None
                and found.status is PluginStatus.STARTING
                and "its init takes" in str(found.error)
            )

        await eventually(waiting)
        assert world.inits().count("begin") == 1, "two processes ran an init at once"
        (world.folder / "go-init").touch()

        async def is_served() -> bool:
            await services.read_catalogue()
            return "initialised" in services.registry

        await eventually(is_served)
        calls = [asyncio.create_task(call(services, "initialised")) for _ in range(20)]
        assert await asyncio.gather(*calls) == ["initialised"] * 20
        await eventually(lambda: world.inits().count("end") == 2)
