"""A connection pooler between a worker and PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pgbouncer_process import PgBouncer, needs_pgbouncer
from redis_process import free_port
from waiting import eventually

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from nekro_agent.methods import SandboxMethodType
from storage.driver.errors import is_refusal
from storage.engine import Database
from storage.files.areas import UploadAreas
from storage.migrate import check, require_schema, upgrade
from storage.repositories.calls import CALL_CLAIMS, CallRequest
from storage.repositories.rounds import RoundReport, RoundRequest
from storage.states import CallState, RoundState, TriggerKind

#: Server connections of the pooler, fewer than each database object here opens.
SERVERS = 2
#: More often than psycopg runs a statement before it prepares it, on each of our connections.
RUNS = 100

Through = Callable[..., DatabaseSettings]


@pytest.fixture
def direct(migrated_copy: Callable[[str], DatabaseSettings]) -> DatabaseSettings:
    """Settings of PostgreSQL itself."""
    return migrated_copy("postgres")


@pytest.fixture
def through(direct: DatabaseSettings) -> Iterator[Through]:
    """Start a pgbouncer in a mode with options; returns settings whose URL has a pool mode."""
    with contextlib.ExitStack() as started:

        def start(mode: str = "transaction", named: str | None = None, **options: Any) -> DatabaseSettings:
            options.setdefault("default_pool_size", SERVERS)
            pooler = started.enter_context(PgBouncer(str(direct.url), mode=mode, **options))
            parameters = {} if named is None else {"pool_mode": named}
            return direct.model_copy(update={"url": pooler.url(**parameters)})

        yield start


@pytest.fixture
async def make_pooled(through: Through, tmp_path: Path) -> AsyncIterator[Callable[..., Database]]:
    """Open the database through a pgbouncer in transaction mode, which the URL names."""
    opened: list[Database] = []

    def make(limits: dict[str, Any] | None = None, **options: Any) -> Database:
        settings = through(named="transaction", **options).model_copy(update=limits or {})
        opened.append(Database(settings, tmp_path))
        return opened[-1]

    yield make
    for database in opened:
        await database.dispose()


# --- the check at the start of a worker ----------------------------------------------------------------


@needs_pgbouncer
async def test_transaction_pooling_that_the_url_does_not_name_is_refused(
    through: Through, tmp_path: Path
) -> None:
    database = Database(through(ignore_startup_parameters="options"), tmp_path)
    with pytest.raises(StorageUnavailableError, match="add the parameter pool_mode=transaction"):
        await require_schema(database)
    await database.dispose()


@needs_pgbouncer
@pytest.mark.parametrize("named", [None, "session"])
async def test_session_pooling_is_accepted(through: Through, tmp_path: Path, named: str | None) -> None:
    settings = through("session", named, default_pool_size=20, ignore_startup_parameters="options")
    database = Database(settings, tmp_path)
    await require_schema(database)
    for _ in range(10):  # more often than psycopg runs a statement before it prepares it
        async with database.begin() as tx:
            await tx.chats.ensure("chat")
    await database.dispose()


@needs_pgbouncer
async def test_transaction_pooling_that_the_url_names_is_accepted(
    make_pooled: Callable[..., Database],
) -> None:
    database = make_pooled()  # without `ignore_startup_parameters`
    await require_schema(database)
    assert database.url.query == {"sslmode": "disable"}


@needs_pgbouncer
async def test_statement_pooling_is_refused(through: Through, tmp_path: Path) -> None:
    database = Database(through("statement", "transaction"), tmp_path)
    with pytest.raises(StorageUnavailableError, match="statement pooling"):
        await require_schema(database)
    await database.dispose()


# --- statements, with fewer server connections than ours ------------------------------------------------


async def run_a_call(database: Database, number: int) -> CallState:
    request = CallRequest(id=f"call {number}", method="a.m.f", type=SandboxMethodType.BEHAVIOR, chat_key="c")
    async with database.autocommit() as tx:
        claim = await tx.calls.claim(request, worker="w", lease_seconds=60)
    async with database.autocommit() as tx:
        held = [(request.id, claim.fence)]
        assert (await tx.leases.renew(CALL_CLAIMS, held, lease_seconds=60)).kept == set(held)
    async with database.begin() as tx:
        await tx.chats.lock(f"chat {number % 5}", create=True)
        await tx.calls.finish(request.id, fence=claim.fence, outcome={"text": str(number)})
    async with database.read() as tx:
        return (await tx.calls.get(request.id)).state


async def run_a_round(database: Database, number: int) -> RoundState:
    chat_key = f"round's chat {number}"
    async with database.begin() as tx:
        await tx.chats.ensure(chat_key)
        fence = await tx.chats.acquire(chat_key, owner="w", lease_seconds=60)
        assert fence is not None
        request = RoundRequest(chat_key=chat_key, trigger_kind=TriggerKind.CALL, trigger_id=str(number))
        await tx.rounds.request(request)
    async with database.begin() as tx:
        claimed = await tx.rounds.claim_next(chat_key, fence=fence, worker="w")
        assert claimed is not None
    async with database.begin() as tx:
        return (await tx.rounds.finish(claimed.round.id, fence=fence, report=RoundReport())).state


@pytest.mark.extended
@needs_pgbouncer
async def test_calls_rounds_and_leases_share_fewer_server_connections(
    make_pooled: Callable[..., Database],
) -> None:
    database = make_pooled()
    calls = asyncio.gather(*(run_a_call(database, number) for number in range(RUNS)))
    rounds = asyncio.gather(*(run_a_round(database, number) for number in range(RUNS)))
    assert set(await calls) == {CallState.DONE}
    assert set(await rounds) == {RoundState.DONE}


@needs_pgbouncer
def test_blocking_reads_and_migrations_work(
    through: Through, make_database: Callable[[str], DatabaseSettings], tmp_path: Path
) -> None:
    areas = UploadAreas(through(named="transaction"), tmp_path, key="k" * 64)
    names = [areas.name(f"chat {number}") for number in range(30)]
    areas.dispose()
    assert len(set(names)) == 30
    empty = make_database("postgres")
    with PgBouncer(str(empty.url), default_pool_size=SERVERS) as pooler:
        settings = empty.model_copy(update={"url": pooler.url(pool_mode="transaction")})
        assert not asyncio.run(check(settings, tmp_path)).migrated
        asyncio.run(upgrade(settings, tmp_path))
        asyncio.run(upgrade(settings, tmp_path))
        status = asyncio.run(check(settings, tmp_path))
    assert status.migrated and status.pool_mode == "transaction"


@needs_pgbouncer
async def test_the_next_server_in_the_url_is_used_when_a_pooler_is_down(
    through: Through, tmp_path: Path
) -> None:
    settings = through(named="transaction")
    url = str(settings.url).replace("@", f"@127.0.0.1:{free_port()},")
    database = Database(settings.model_copy(update={"url": url}), tmp_path)
    await require_schema(database)
    assert await run_a_call(database, 1) is CallState.DONE
    await database.dispose()


# --- time limits ----------------------------------------------------------------------------------------

LIMITS = (
    "SELECT current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout'), "
    "pg_backend_pid()"
)


@needs_pgbouncer
async def test_a_transaction_sets_its_limits_and_leaves_none_to_others(
    make_pooled: Callable[..., Database],
) -> None:
    database = make_pooled({"transaction_timeout_seconds": 7}, default_pool_size=1)
    async with database.begin() as tx:
        *inside, process = (await tx.connection.exec_driver_sql(LIMITS)).one()
    async with database.read() as tx:
        *outside, same_process = (await tx.connection.exec_driver_sql(LIMITS)).one()
    assert inside == ["7s", "7s"]
    assert outside == ["0", "0"] and same_process == process


async def test_blocking_transactions_set_their_limits_too(direct: DatabaseSettings, tmp_path: Path) -> None:
    limits = {"url": f"{direct.url}&pool_mode=transaction", "transaction_timeout_seconds": 7}
    areas = UploadAreas(direct.model_copy(update=limits), tmp_path, key="k" * 64)
    with areas._engine.connect() as connection:
        assert connection.exec_driver_sql(LIMITS).one()[:2] == ("7s", "7s")
        connection.rollback()
        assert connection.exec_driver_sql(LIMITS).one()[:2] == ("7s", "7s")
    areas.dispose()


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_limits_cost_no_round_trip(direct: DatabaseSettings, tmp_path: Path, mode: str) -> None:
    database = Database(direct.model_copy(update={"url": f"{direct.url}&pool_mode={mode}"}), tmp_path)
    async with database.read() as tx:
        await tx.connection.exec_driver_sql("SELECT 1")
        connection: Any = tx.connection.driver
    with tempfile.TemporaryFile() as trace:
        connection._connection.pgconn.trace(trace.fileno())
        async with database.begin() as tx:
            assert tx.connection.driver is connection
            await tx.connection.exec_driver_sql("SELECT 1")
        connection._connection.pgconn.untrace()  # writes what is buffered
        trace.seek(0)
        # The server ends each of its answers with this message.
        round_trips = trace.read().count(b"ReadyForQuery")
    await database.dispose()
    assert round_trips == 3  # BEGIN, the statement, COMMIT


async def running_on(direct: DatabaseSettings, words: str) -> int:
    """How many statements run on PostgreSQL that contain words, besides this one."""
    async with await psycopg.AsyncConnection.connect(str(direct.url)) as connection:
        cursor = await connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' "
            "AND position(%s in query) > 0 AND pid <> pg_backend_pid()",
            [words],
        )
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def until_none_runs(direct: DatabaseSettings, words: str) -> None:
    async def is_over() -> bool:
        return await running_on(direct, words) == 0

    await eventually(is_over, what=f"{words} to be stopped")


async def sleep_in(way: Any) -> None:
    async with way() as tx:
        await tx.connection.exec_driver_sql("SELECT pg_sleep(300)")


@needs_pgbouncer
@pytest.mark.parametrize("way", ["begin", "autocommit", "read"])
async def test_a_statement_over_its_limit_is_stopped_on_the_server(
    make_pooled: Callable[..., Database], direct: DatabaseSettings, way: str
) -> None:
    database = make_pooled({"transaction_timeout_seconds": 1})
    with pytest.raises(StorageUnavailableError) as caught:
        await sleep_in(getattr(database, way))
    await until_none_runs(direct, "pg_sleep(300)")
    assert is_refusal(caught.value), caught.value
    assert await run_a_call(database, 1) is CallState.DONE


@pytest.mark.extended
@needs_pgbouncer
@pytest.mark.parametrize("way", ["begin", "autocommit"])
async def test_a_cancelled_statement_is_stopped_and_disturbs_no_other(
    make_pooled: Callable[..., Database], direct: DatabaseSettings, way: str
) -> None:
    database = make_pooled()
    sleeping = asyncio.create_task(sleep_in(getattr(database, way)))

    async def is_running() -> bool:
        return await running_on(direct, "pg_sleep(300)") == 1

    await eventually(is_running, what="the statement to run")
    calls = asyncio.gather(*(run_a_call(database, number) for number in range(RUNS)))
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert set(await calls) == {CallState.DONE}
    await until_none_runs(direct, "pg_sleep(300)")


# --- errors of the pooler itself ------------------------------------------------------------------------


async def add_chat(way: Any) -> None:
    async with way() as tx:
        await tx.connection.exec_driver_sql("INSERT INTO leases (name, fence) VALUES ('a', 0)")


@needs_pgbouncer
@pytest.mark.parametrize(("way", "is_certain"), [("begin", True), ("autocommit", False)])
async def test_a_transaction_that_got_no_server_did_not_run(
    make_pooled: Callable[..., Database], way: str, is_certain: bool
) -> None:
    """The code of the pooler's error is the same when a server ends, so a single statement is in doubt."""
    database = make_pooled(default_pool_size=1, query_wait_timeout=1)
    async with database.begin() as tx:
        await tx.connection.exec_driver_sql("SELECT 1")
        with pytest.raises(StorageUnavailableError) as caught:
            await asyncio.create_task(add_chat(getattr(database, way)))
    assert is_refusal(caught.value) is is_certain, caught.value
    assert await run_a_call(database, 1) is CallState.DONE


@needs_pgbouncer
async def test_the_outcome_is_unknown_when_the_server_ends_inside_a_statement(
    make_pooled: Callable[..., Database], direct: DatabaseSettings
) -> None:
    database = make_pooled()
    async with database.read() as tx:
        with pytest.raises(StorageUnavailableError) as caught:
            await tx.connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
    assert not is_refusal(caught.value)
    assert await run_a_call(database, 1) is CallState.DONE


def _error(kind: type[psycopg.Error]) -> StorageUnavailableError:
    error = StorageUnavailableError("it failed")
    error.__cause__ = kind()
    return error


@pytest.mark.parametrize(
    ("kind", "did_not_run"),
    [
        (psycopg.errors.ProtocolViolation, False),  # 08P01: any error of a pooler
        (psycopg.errors.AdminShutdown, False),  # 57P01
        (psycopg.errors.CrashShutdown, False),  # 57P02
        (psycopg.errors.CannotConnectNow, True),  # 57P03: of a server that the pooler could not reach
        (psycopg.errors.TooManyConnections, True),  # 53300: the same
        (psycopg.errors.QueryCanceled, True),  # 57014
        (psycopg.OperationalError, False),  # a broken connection has no code
    ],
)
def test_codes_say_whether_a_statement_ran(kind: type[psycopg.Error], did_not_run: bool) -> None:
    assert is_refusal(_error(kind)) is did_not_run
