"""What commands and workers import: commands no plugin, and both no library that they do not need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from worker_fleet import Fleet, build_fleet

from nekro.cli.environment import environment_of
from nekro.cli.main import COMMANDS

pytestmark = pytest.mark.extended

#: Runs commands, then writes the names of all imported modules to a file.
_PROBE = """
import json, sys
from nekro.cli.main import main
modules, commands = sys.argv[1:]
for arguments in json.loads(commands):
    try:
        code = main(arguments)
    except SystemExit as exc:
        code = exc.code
    if code:
        sys.exit(f"{arguments}: {code}")
with open(modules, "w") as file:
    json.dump(sorted(name for name, module in sys.modules.items() if module is not None), file)
"""
#: Libraries that take long to import, and packages that only workers need.
HEAVY = (
    "sqlalchemy", "alembic", "celery", "kombu", "opentelemetry", "jinja2", "httpcore", "httpx",
    "yaml",
    "prometheus_client", "psycopg", "plugin_pkgs", "nekro_plugins", "nekro.agent", "nekro.plugins.loader",
    "workers.pools", "nekro_agent.plugin", "nekro_agent.schemas.agent_ctx",
)  # fmt: skip
#: What a worker of methods on SQLite does not import before its first call: other databases' dialects, HTTP
#: clients, the agent, sandboxes, the gateway.
NOT_OF_A_WORKER = (
    "sqlalchemy.dialects.postgresql", "psycopg", "alembic", "httpcore", "httpx", "h2", "openai", "jinja2",
    "mcp", "fastapi", "uvicorn", "nekro_agent.testing", "nekro.agent.answers", "nekro.agent.prompt",
    "nekro.agent.llm.clients", "nekro.sandbox.manager", "nekro.gateway", "workers.rounds",
)  # fmt: skip
#: Writes the names of all modules as soon as the worker has loaded what it keeps, and stops the worker.
PROBE_PLUGIN = """
import asyncio, gc, json, os, pathlib, signal, sys

from nekro_agent.api.plugin import NekroPlugin

plugin = NekroPlugin("Probe", "probe", "", "1", "tests", "")


def look(loop):
    if not gc.isenabled():  # off while the worker starts
        loop.call_later(0.01, look, loop)
        return
    modules = [name for name, module in sys.modules.items() if module is not None]
    pathlib.Path("modules.json").write_text(json.dumps(modules))
    os.kill(os.getpid(), signal.SIGTERM)


@plugin.mount_init_method()
async def begin():
    look(asyncio.get_running_loop())
"""
PLUGIN = '''
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin("Light", "light", "", "1", "tests", "")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "shine")
async def shine(_ctx, times: int = 1) -> str:
    """Shine."""
    return "*" * times


@plugin.mount_command("light", description="Lights up")
async def light(context):
    return "on"
'''


def imported_by(*commands: Sequence[str], environ: dict[str, str], directory: Path) -> set[str]:
    """Run commands one after another in a new interpreter; returns the modules that any of them imported."""
    modules = directory / "modules.json"
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE, str(modules), json.dumps(commands)],
        env=environ, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (commands, done.stderr)
    return set(json.loads(modules.read_text("utf-8")))


def heavy(modules: set[str], names: Sequence[str] = HEAVY) -> list[str]:
    """Those of the names that are among the modules."""
    return [name for name in names if name in modules or any(m.startswith(f"{name}.") for m in modules)]


@pytest.fixture(scope="module")
def fleet(redis_server: object, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A fleet with one worker that serves the plugin."""
    directory = tmp_path_factory.mktemp("imports")
    (directory / "plugins").mkdir()
    (directory / "plugins" / "light.py").write_text(PLUGIN, "utf-8")
    plugins = {"dirs": (directory / "plugins",)}
    url = f"sqlite:///{directory / 'nekro.db'}"
    built = build_fleet(directory, redis_server.url, url, plugins=plugins)  # type: ignore[attr-defined]
    built.start("methods")
    return built


@pytest.fixture(scope="module", autouse=True)
def stopped(fleet: Fleet) -> Iterator[None]:
    yield
    fleet.stop()


@pytest.fixture
def run(fleet: Fleet, tmp_path: Path) -> Callable[..., set[str]]:
    """Run commands on the fleet in one interpreter."""
    return lambda *commands: imported_by(
        *commands, environ=environment_of(fleet.settings), directory=tmp_path
    )


def test_a_worker_imports_no_more_than_its_first_call_needs(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "probe.py").write_text(PROBE_PLUGIN, "utf-8")
    environ = {**environment_of(fleet.settings), "NEKRO_PLUGINS__DIRS": str(tmp_path / "plugins")}
    command = [sys.executable, "-P", "-m", "nekro.cli.main", "worker", "--lane", "methods"]
    done = subprocess.run(
        command,
        env=environ,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    modules = set(json.loads((tmp_path / "modules.json").read_text("utf-8")))
    assert heavy(modules, NOT_OF_A_WORKER) == []


def test_help_imports_no_settings_and_no_library(tmp_path: Path) -> None:
    modules = imported_by(["--help"], environ={"PATH": ""}, directory=tmp_path)
    assert heavy(modules) == []
    assert not {
        name for name in modules if name.partition(".")[0] in ("pydantic", "redis", "asyncio", "loguru")
    }


def test_a_call_imports_neither_plugins_nor_sqlalchemy_nor_celery(
    fleet: Fleet, run: Callable[..., set[str]]
) -> None:
    fleet.run("call", "shine")  # the chat exists from now on
    assert heavy(run(["call", "shine", "--json"], ["call", "tests.light.shine", "--args", "[3]"])) == []


def test_lists_import_neither_plugins_nor_a_broker(run: Callable[..., set[str]]) -> None:
    assert heavy(run(["plugins", "--json"], ["methods"], ["command"])) == []


def test_dead_letters_are_listed_without_libraries_of_the_database(run: Callable[..., set[str]]) -> None:
    assert {"sqlalchemy", "httpx", "httpcore", "opentelemetry.sdk"}.isdisjoint(run(["dead"]))


def test_no_command_imports_a_plugin_or_the_plugin_loader(
    run: Callable[..., set[str]], tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text("print(shine())")
    modules = run(
        ["command", "c", "/light"],
        ["exec", "code.py", "--no-follow-up"],
        ["send", "c", "hello"],
        ["reset", "c"],
        ["history", "c"],
        ["jobs"],
        ["doctor", "--settings"],
    )
    assert {"plugin_pkgs", "nekro_plugins", "nekro.plugins.loader"}.isdisjoint(modules)
    assert "httpx" in modules and {"rich", "pygments"}.isdisjoint(modules)  # of httpx's command line


def test_every_command_parses_without_plugins_and_sqlalchemy(tmp_path: Path) -> None:
    helps = [[command.name, "--help"] for command in COMMANDS]
    modules = imported_by(*helps, environ={"PATH": ""}, directory=tmp_path)
    assert {"plugin_pkgs", "nekro.plugins.loader", "sqlalchemy"}.isdisjoint(modules)


def test_a_command_beside_a_running_system_imports_no_celery() -> None:
    program = (
        "import asyncio, sys\n"
        "from nekro.cli.services.system import _watched\n"
        "async def main():\n"
        "    async with _watched((), None):\n"
        "        return sorted({'celery', 'sqlalchemy'} & set(sys.modules))\n"
        "print(asyncio.run(main()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
