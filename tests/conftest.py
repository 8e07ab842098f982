"""Real servers for the tests: Redis and PostgreSQL from pip, on sockets and ports of their own."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psycopg
import pytest
import redis
from _pytest.unraisableexception import collect_unraisable
from forked_run import pytest_addoption as pytest_addoption
from forked_run import pytest_runtestloop as pytest_runtestloop
from left_out import pytest_terminal_summary as pytest_terminal_summary
from loguru import logger
from postgres_process import PostgresServer
from redis_process import RedisServer
from sentinel_group import SentinelGroup
from sqlalchemy.engine import make_url
from waiting import WAIT_SECONDS

from broker_config.app import NekroApp, create_app
from broker_config.settings import DatabaseSettings, Settings
from broker_config.urls import redis_address
from storage.driver.connection import DriverRows
from storage.migrate import upgrade
from storage.tables import metadata
from storage.transaction import Transaction

if TYPE_CHECKING:
    from worker_fleet import Fleet

    from nekro.app.services import Services

# A shell that runs the tests in the background makes them ignore SIGINT, which child processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does; those of one test may share its fixtures.
hypothesis.settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("busy")

# Collection allocates half a gigabyte that stays; the garbage collector need not scan it.
gc.disable()

#: Time that clean-up may take after a test's time limit.
HANG_SECONDS = 240.0
RUN_STDERR = pytest.StashKey[int]()

#: Files that take longest, mostly by waiting, then directories whose files take long. They run first, so
#: that no process is left alone with one of them at the end.
LONG_FIRST = [
    "docs/test_commands_run.py",
    "plugins/test_authored_plugins.py",
    "gateway/test_gateway_openai.py",
    "test_layers.py",
    "test_private_uses.py",
    "test_lines_of_others.py",
    "storage/test_storage_single.py",
    "sandbox/test_sandbox_attacks_limits.py",
    "plugins/test_spec_examples.py",
    "console/test_console_changes.py",
    "system/test_clocks.py",
    "rounds/test_rounds_continued.py",
    "docs/test_readme.py",
    "system/test_reload.py",
    "console/test_console_pages.py",
    "console/test_console_large.py",
    "system/test_mcp_fleet.py",
    "storage/test_call_outcomes.py",
    "rounds/test_rounds_order.py",
    "rounds/test_rounds_processes.py",
    "pool/test_handoff.py",
    "gateway/test_changes.py",
    "bench/test_bench_evaluation.py",
    "storage/test_storage_migrate.py",
    "sandbox/test_sandbox_attacks_guards.py",
    "system/test_catalogue.py",
    "runtime/test_leases.py",
    "gateway/test_outgoing_webhooks.py",
    "connectors/test_mcp_stdio.py",
    "console",
    "pool",
    "rounds",
    "plugins",
    "system",
    "gateway",
    "security",
    "docs",
    "client",
    "storage",
    "sandbox",
    "cli",
    "faults",
    "long",
    "agent",
    "runtime",
    "broker",
]


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Keep binary values out of the names of tests: archives contain the time at which they were made."""
    is_binary = isinstance(val, bytes) and not val.decode("latin-1").isprintable()
    return argname if is_binary else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files and directories by `LONG_FIRST`; the order within them is kept."""
    here = Path(__file__).parent
    ranks = {here / name: rank for rank, name in enumerate(LONG_FIRST)}
    files = {item.path for item in items}
    order = {path: ranks.get(path, ranks.get(path.parent, len(ranks))) for path in files}
    items.sort(key=lambda item: order[item.path])


def pytest_collection_finish() -> None:
    """Exclude the objects of the collection from every later garbage collection."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep the standard error of the run, which is replaced while tests run."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        session.config.stash[RUN_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Bound a test whose time limit cannot end it.

    The limit raises once, in the main thread. A test that hangs outside of Python code, or in the clean-up
    after that, would keep the run open without a word. Its process ends instead, with the stack of each
    thread on the standard error; the rest of its tests run in another process.
    """
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker is not None and marker.args else item.config.getini("timeout")
    stderr = item.config.stash[RUN_STDERR]
    faulthandler.dump_traceback_later(float(limit) + HANG_SECONDS, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Fail the file whose tests left a connection, a loop or a coroutine open, and not one that runs later.

    What is in a cycle is otherwise found whenever a collection happens: in the middle of another test, where
    its warning can break what runs then. A collection after each test would take longer than the tests.
    """
    outcome = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        collect_unraisable(item.config)
    return outcome


@pytest.fixture
def passable_dir() -> Iterator[Path]:
    """A directory whose parents any user may enter, for code that sees host paths and has another user."""
    path = Path(tempfile.mkdtemp(prefix="nekro-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def logged() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Event and fields of each record that this process logs during the test."""
    found: list[tuple[str, dict[str, Any]]] = []

    def keep(message: Any) -> None:
        found.append((message.record["message"], message.record["extra"]))

    sink = logger.add(keep, level=0)
    yield found
    logger.remove(sink)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole test process; tests isolate themselves by key prefix."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test alone, for tests that stop or restart it."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL for the whole test process."""
    with PostgresServer.temporary() as server:
        yield server


@pytest.fixture
def sentinel_group(tmp_path: Path) -> Iterator[SentinelGroup]:
    """A primary, two replicas and three Sentinels."""
    directory = tmp_path / "group"
    directory.mkdir()
    with SentinelGroup(directory) as group:
        yield group


def patient_database(url: str) -> DatabaseSettings:
    """Settings whose callers wait for a connection as long as a busy machine needs."""
    return DatabaseSettings(url=url, pool_timeout_seconds=WAIT_SECONDS)


@pytest.fixture
def make_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], DatabaseSettings]:
    """Create a fresh, empty database of a kind, ``sqlite`` or ``postgres``."""

    def make(kind: str) -> DatabaseSettings:
        if kind == "sqlite":
            return patient_database(f"sqlite:///{tmp_path / 'test.db'}")
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return patient_database(server.create_database())

    return make


@pytest.fixture(params=["sqlite", "postgres"])
def database_settings(
    request: pytest.FixtureRequest, make_database: Callable[[str], DatabaseSettings]
) -> DatabaseSettings:
    """A fresh, empty database of each kind."""
    return make_database(request.param)


@pytest.fixture(scope="session")
def migrated_template(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], str]:
    """Return the URL of a migrated database of a kind, which is only copied; migrations run once per kind."""

    @functools.cache
    def template(kind: str) -> str:
        if kind == "sqlite":
            url = f"sqlite:///{tmp_path_factory.mktemp('template')}/nekro.db"
        else:
            url = request.getfixturevalue("postgres_server").create_database()
        # In a thread, as the requesting test may have a running loop in this one.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, upgrade(patient_database(url), Path())).result()
        return url

    return template


@pytest.fixture(scope="session")
def new_database(
    migrated_template: Callable[[str], str], request: pytest.FixtureRequest
) -> Callable[[str, Path], str]:
    """Create an empty, migrated database of a kind, SQLite's in a directory; returns its URL."""

    def create(kind: str, directory: Path) -> str:
        template = migrated_template(kind)
        if kind == "sqlite":
            target = directory / "nekro.db"
            shutil.copyfile(template.removeprefix("sqlite:///"), target)
            return f"sqlite:///{target}"
        name = str(make_url(template).database)
        url: str = request.getfixturevalue("postgres_server").create_database(template=name)
        return url

    return create


@pytest.fixture(scope="session")
def migrated_copy(
    tmp_path_factory: pytest.TempPathFactory,
    migrated_template: Callable[[str], str],
    new_database: Callable[[str, Path], str],
) -> Callable[[str], DatabaseSettings]:
    """Create an empty, migrated database of a kind; it may be used until the next one is created."""
    directory = tmp_path_factory.mktemp("database")

    @functools.cache
    def postgres() -> str:
        return new_database("postgres", directory)

    def emptied() -> str:
        # One database that is emptied: creating one takes PostgreSQL longer than most tests take.
        with psycopg.connect(postgres(), autocommit=True) as connection:
            tables = reversed(metadata.sorted_tables)
            connection.execute(";".join(f'DELETE FROM "{table.name}"' for table in tables))  # type: ignore[call-overload]
        return postgres()

    def sqlite() -> str:
        # Each in a file of its own: the last one may still be open, and its log would be read into the next.
        return new_database("sqlite", tmp_path_factory.mktemp("database"))

    return lambda kind: patient_database(sqlite() if kind == "sqlite" else emptied())


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.extended)])
def database_url(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    new_database: Callable[[str, Path], str],
) -> str:
    """A migrated database for the module, of each kind."""
    return new_database(request.param, tmp_path_factory.mktemp("database"))


@pytest.fixture(scope="module")
def sqlite_url(tmp_path_factory: pytest.TempPathFactory, new_database: Callable[[str, Path], str]) -> str:
    """A migrated SQLite database, for a `database_url` of modules whose results its kind does not decide."""
    return new_database("sqlite", tmp_path_factory.mktemp("database"))


@pytest.fixture(scope="module")
def fleet_plugins(request: pytest.FixtureRequest) -> Path:
    """Plugins of the module's fleets, unless a fleet has others."""
    return Path(request.path).parent / "plugins"


@pytest.fixture(scope="module")
def make_fleet(
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
    database_url: str,
    fleet_plugins: Path,
) -> Iterator[Callable[..., Fleet]]:
    """Build fleets on the session's Redis and the module's database.

    Each has a key prefix and a data directory of its own.
    """
    from worker_fleet import build_fleet  # imports what workers import, which few tests need

    fleets: list[Fleet] = []

    def build(**overrides: Any) -> Fleet:
        overrides = {"plugins": {"dirs": (fleet_plugins,)}, **overrides}
        directory = tmp_path_factory.mktemp("fleet")
        fleets.append(build_fleet(directory, redis_server.url, database_url, **overrides))
        return fleets[-1]

    yield build
    for fleet in fleets:
        fleet.stop()


@pytest.fixture
async def services(fleet: Fleet) -> AsyncIterator[Services]:
    """Services of the module's fleet in this process."""
    services = fleet.services()
    await services.start()
    yield services
    await services.close()


@pytest.fixture
def no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send no spans; a test reads them from memory."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")


@pytest.fixture
def make_settings(tmp_path: Path, redis_url: str) -> Callable[..., Settings]:
    """Build settings on the session's Redis, a key prefix of this test and a data directory of its own."""

    def build(**overrides: Any) -> Settings:
        values: dict[str, Any] = {
            "data_dir": tmp_path / "data",
            "broker": {"url": redis_url, "key_prefix": f"t{uuid.uuid4().hex}:"},
            "security": {"signing_key": "test-signing-key"},
        }
        for name, value in overrides.items():
            old = values.get(name)
            values[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        return Settings.load(env_file=None, **values)

    return build


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    """Settings with default values; modules that need other values define their own fixture."""
    return make_settings()


@pytest.fixture
def app(settings: Settings) -> Iterator[NekroApp]:
    """Publisher and caller services with the test's settings."""
    app = create_app(settings)
    yield app
    app.backend.result_consumer.stop()
    app.close()


@pytest.fixture
def client(settings: Settings) -> Iterator[redis.Redis]:
    """A plain client of the test's broker."""
    with redis.Redis.from_url(redis_address(str(settings.broker.url)).server_url) as client:
        yield client


@pytest.fixture
def watch_statements(monkeypatch: pytest.MonkeyPatch) -> Callable[[Transaction], list[tuple[str, Any]]]:
    """Record the SQL and parameters that a transaction passes to the driver from now on."""

    def watch(transaction: Transaction) -> list[tuple[str, Any]]:
        driver, statements = transaction.connection.driver, []
        execute = driver.execute

        async def remembering(sql: str, parameters: Any = None, **options: Any) -> DriverRows:
            statements.append((sql, parameters))
            return await execute(sql, parameters, **options)

        monkeypatch.setattr(driver, "execute", remembering)
        return statements

    return watch
