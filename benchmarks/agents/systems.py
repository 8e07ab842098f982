"""The systems of a comparison: what they run, how they are started, and what they do not do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.harness.contender import ROOT, NotAvailableError
from benchmarks.harness.postgres_server import PostgresServer, postgres_server
from benchmarks.harness.processes import Child, free_port, local_headers
from benchmarks.harness.redis_server import redis_server

__all__ = ["SYSTEMS", "Running", "System", "our_system", "system_named"]

#: Of `scripts/install-agent-peers`.
_PEERS: Final = Path(os.environ.get("AGENT_PEERS_DIR", ROOT / ".agent-peers"))
_PLUGINS: Final = Path(__file__).parent / "plugins"
#: That smolagents makes of python:3.12-bullseye and a Jupyter kernel, if the engine does not have it.
_IMAGE: Final = "jupyter-kernel"
_START_SECONDS: Final = 90.0
_TURN_SECONDS: Final = 60
_NONE: Final[Mapping[str, int]] = {}


@dataclass(frozen=True, kw_only=True)
class Running:
    """A system that answers."""

    #: Returns its processes by name; those below them belong to it too.
    processes: Callable[[], dict[str, tuple[int, ...]]]
    url: str
    headers: dict[str, str]
    #: Path and body of the request that posts a text to a chat, and waits for the answer.
    request: Callable[[str, str], tuple[str, dict[str, Any]]]
    #: Of our system; None for others and for SQLite.
    database: PostgresServer | None = None
    redis_url: str | None = None


@dataclass(frozen=True, kw_only=True)
class System:
    """One system."""

    name: str
    about: str
    #: What this project does in a turn, and the system does not.
    lacks: str
    #: Starts it with files in a directory and a model's base URL.
    start: Callable[[Path, str], AbstractContextManager[Running]]
    #: Share of the turns of a plan: less where each chat costs much.
    share: float = 1.0


def _environment(**variables: str) -> dict[str, str]:
    """Return the environment of a system, without the settings of the shell."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")}
    return {**inherited, "PYTHONPATH": str(ROOT), **variables}


class _Starter:
    """The processes of a system, which end with the block."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self._directory = directory
        self.children: list[Child] = []

    def start(self, name: str, command: list[str], **variables: str) -> None:
        child = Child(
            command,
            log=self._directory / f"{name}.log",
            environment=_environment(**variables),
            directory=self._directory,
        )
        self.children.append(self._stack.enter_context(child))

    def processes(self, others: Mapping[str, int]) -> Callable[[], dict[str, tuple[int, ...]]]:
        found = {**{child.log.stem: child.pid for child in self.children}, **others}
        return lambda: {name: (pid,) for name, pid in found.items()}

    def await_answer(self, url: str, headers: Callable[[], dict[str, str]], expected: str) -> None:
        """Wait until a page has a text.

        Raises:
            NotAvailableError: a process ended, or it took too long; the message has what it said.
        """
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            for child in self.children:
                if child.ended() is not None:
                    raise NotAvailableError(f"{child.log.stem} ended: {child.last_words()}")
            try:
                if expected in httpx.get(url, headers=headers()).text:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise NotAvailableError(f"{url} does not answer")


@contextmanager
def our_system(
    directory: Path,
    model_url: str,
    *,
    postgresql: bool,
    plugins: Path = _PLUGINS,
    method: str = "bench.turn.report",
) -> Iterator[Running]:
    """A gateway, a methods worker and a rounds worker, with the defaults of all settings but addresses.

    It answers as soon as its workers have published the ``method``.
    """
    from broker_config.settings import Settings
    from storage.migrate import upgrade

    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(directory))
        starter = _Starter(stack, directory)
        others, database = {"redis": redis.pid}, None
        settings = {
            "NEKRO_BROKER__URL": redis.url,
            "NEKRO_DATA_DIR": str(directory / "data"),
            "NEKRO_PLUGINS__DIRS": str(plugins),
            "NEKRO_LOG__LEVEL": "WARNING",
            "NEKRO_LLM__BASE_URL": model_url,
            "NEKRO_LLM__API_KEY": "none",
            "NEKRO_LLM__MODEL": "bench",
            "NEKRO_LLM__STREAM": "false",
            "NEKRO_GATEWAY__REQUESTS_PER_MINUTE": "0",
        }
        if postgresql:
            database = stack.enter_context(postgres_server())
            settings["NEKRO_DATABASE__URL"] = database.url
            others["postgresql"] = database.pid
        loaded = Settings.load(
            env_file=None,
            data_dir=directory / "data",
            database={"url": settings.get("NEKRO_DATABASE__URL")},
        )
        asyncio.run(upgrade(loaded.database, loaded.data_dir))
        nekro, port = str(Path(sys.executable).with_name("nekro")), free_port()
        starter.start("methods", [nekro, "worker", "--lane", "methods"], **settings)
        starter.start("rounds", [nekro, "worker", "--lane", "rounds"], **settings)
        starter.start("gateway", [nekro, "gateway", "--port", str(port)], **settings)
        url = f"http://127.0.0.1:{port}"
        headers = partial(local_headers, directory / "data")
        starter.await_answer(f"{url}/api/v1/methods", headers, method)
        yield Running(
            processes=starter.processes(others),
            url=url,
            headers=headers(),
            request=lambda chat, text: (
                f"/api/v1/chats/{chat}/messages?wait={_TURN_SECONDS}",
                {"text": text, "user_id": "ada"},
            ),
            database=database,
            redis_url=redis.url,
        )


def _peer_command(module: str, *arguments: str) -> list[str]:
    python = _PEERS / "bin" / "python"
    if not python.exists():
        raise NotAvailableError("not installed (make agent-peers)")
    return [str(python), "-m", f"benchmarks.agents.{module}", *arguments]


def _site(starter: _Starter, module: str, *arguments: str, others: Mapping[str, int] = _NONE) -> Running:
    port = free_port()
    # No telemetry, and nothing from the network.
    quiet = {"LANGSMITH_TRACING": "false", "HF_HUB_OFFLINE": "1", "TEMPORAL_DISABLE_CLIENT_CONFIG": "1"}
    starter.start("site", _peer_command(module, str(port), *arguments), **quiet)
    url = f"http://127.0.0.1:{port}"
    starter.await_answer(f"{url}/openapi.json", dict, "/turns")
    return Running(
        processes=starter.processes(others),
        url=url,
        headers={},
        request=lambda chat, text: ("/turns", {"chat": chat, "text": text}),
    )


@contextmanager
def _langgraph(directory: Path, model_url: str) -> Iterator[Running]:
    with ExitStack() as stack:
        _peer_command("langgraph_site")
        database = stack.enter_context(postgres_server())
        starter = _Starter(stack, directory)
        yield _site(starter, "langgraph_site", model_url, database.url, others={"postgresql": database.pid})


@contextmanager
def _smolagents(directory: Path, model_url: str, *, executor: str) -> Iterator[Running]:
    with ExitStack() as stack:
        if executor == "docker":
            _containers()
        site = _site(_Starter(stack, directory), "smolagents_site", model_url, executor)
        if executor != "docker":
            yield site
            return
        stack.callback(_remove_containers, _containers())
        own = site.processes()
        yield replace(site, processes=lambda: {**own, "containers": tuple(map(_pid_of, _containers()))})


def _docker(*arguments: str) -> list[str]:
    """Return the words that docker says.

    Raises:
        NotAvailableError: no engine answers.
    """
    try:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise NotAvailableError("docker is not installed") from None
    if done.returncode:
        raise NotAvailableError(f"docker: {done.stderr.strip()}")
    return done.stdout.split()


def _containers() -> set[str]:
    return set(_docker("ps", "--quiet", "--filter", f"ancestor={_IMAGE}"))


def _pid_of(container: str) -> int:
    return int(_docker("inspect", "--format", "{{.State.Pid}}", container)[0])


def _remove_containers(before: set[str]) -> None:
    added = sorted(_containers() - before)
    if added:
        # Not checked: it fails for one that goes already.
        subprocess.run(["docker", "rm", "--force", *added], capture_output=True)


@contextmanager
def _temporal(directory: Path, model_url: str) -> Iterator[Running]:
    with ExitStack() as stack:
        _peer_command("temporal_site")
        starter, port = _Starter(stack, directory), free_port()
        # fmt: off
        starter.start("temporal", [
            str(_PEERS / "bin" / "temporal"), "server", "start-dev", "--headless", "--ip", "127.0.0.1",
            "--port", str(port), "--db-filename", str(directory / "temporal.db"), "--log-level", "error",
        ])
        # fmt: on
        yield _site(starter, "temporal_site", model_url, f"127.0.0.1:{port}")


SYSTEMS: Final = (
    System(
        name="nekro-postgresql",
        about="gateway, one methods and one rounds worker with all shipped plugins, Redis, PostgreSQL",
        lacks="",
        start=partial(our_system, postgresql=True),
    ),
    System(
        name="nekro-sqlite",
        about="the same with SQLite",
        lacks="",
        start=partial(our_system, postgresql=False),
    ),
    System(
        name="langgraph",
        about="FastAPI, a graph with AsyncPostgresSaver on PostgreSQL, a subprocess for each run of code",
        lacks="no queue, sandbox, limits or record of calls; a graph whose process dies stays where it was"
        " until it is invoked again, and its code then runs anew",
        start=_langgraph,
    ),
    System(
        name="smolagents-local",
        about="FastAPI, a CodeAgent for each chat with the local executor, which interprets the code",
        lacks="nothing is stored: a chat ends with the process, in which the code is interpreted and the"
        " methods run",
        start=partial(_smolagents, executor="local"),
    ),
    System(
        name="smolagents-docker",
        about="the same with the Docker executor: a container with a Jupyter kernel for each chat",
        lacks="nothing is stored; methods run in the container, with the same rights as the code",
        start=partial(_smolagents, executor="docker"),
        share=0.2,
    ),
    System(
        name="temporal",
        about="FastAPI and a worker in one process, a workflow for each chat, the dev server on SQLite",
        lacks="no sandbox or limits for the code's subprocess; its three calls are one activity, which is"
        " repeated as a whole after a crash",
        start=_temporal,
    ),
)


def system_named(name: str) -> System:
    """Return one system.

    Raises:
        LookupError: there is none of that name; the message lists the known ones.
    """
    for system in SYSTEMS:
        if system.name == name:
            return system
    raise LookupError(f"no system {name!r}; there are {', '.join(system.name for system in SYSTEMS)}")
