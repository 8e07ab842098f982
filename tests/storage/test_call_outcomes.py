"""Outcomes of recorded calls as callers see them, when the database or the broker fails meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import redis.asyncio
from cut_proxy import CutProxy
from database_outage import DatabaseOutage
from loguru import logger
from pydantic import SecretStr
from redis_relay import RedisRelay
from waiting import WAIT_SECONDS, eventually

from broker_config.app import create_app
from broker_config.settings import BudgetSettings, DatabaseSettings, Settings
from nekro.app.approvals.requests import ApprovalCheck, ApprovalSeal
from nekro.app.background import BackgroundLoop
from nekro.app.calls.detached import CallDetacher
from nekro.app.calls.records import CallRecords, error_of
from nekro.app.chats.publisher import EventPublisher
from nekro.app.leases import LeaseKeeper
from nekro.app.spending import Spending
from nekro.broker.calls import MethodCaller
from nekro.broker.publishing import PUSH
from nekro.plugins.entries import MethodEntry
from nekro.wire import plain_json
from nekro.wire.invocation import Envelope, Invocation, new_id
from nekro_agent import errors
from nekro_agent.errors import (
    BrokerUnavailableError,
    CallTimeoutError,
    FencedError,
    OutcomeUnknownError,
    StorageUnavailableError,
)
from nekro_agent.methods import Lane, SandboxMethodType
from nekro_agent.ports import JobInfo, JobRequest, SystemMessageHooks
from storage.accounts.spendings import ModelUse, NewSpending, ScopeKey
from storage.driver.postgresql import PostgresConnection
from storage.engine import Database
from storage.repositories.calls import Call, CallRequest, ClaimVerdict
from storage.states import BudgetScope, CallState
from storage.transaction import Transaction
from workers.calls import claims as claims_module
from workers.calls.claims import CallClaims, HeldClaim
from workers.jobs.service import SqlJobs

METHOD = "a.m.f"


class Storage(DatabaseOutage):
    """A database that can be made unreachable, with a second connection past the outage."""

    def __init__(self, settings: DatabaseSettings, tmp_path: Path, proxy: CutProxy | None) -> None:
        super().__init__(str(settings.url), proxy)
        self._proxied = proxy
        limits = {"transaction_timeout_seconds": 1, "pool_timeout_seconds": 0.1}
        self.database = Database(settings.model_copy(update=limits), tmp_path)

    @property
    def proxy(self) -> CutProxy:
        """The same for PostgreSQL."""
        assert self._proxied is not None
        return self._proxied

    def break_connections(self) -> None:
        """End every connection; new ones work."""
        self.go_away()
        self.come_back()

    async def lose_confirmations(self) -> None:
        """Let PostgreSQL execute statements from now on, and drop its replies."""
        await self.call("connect")
        self.proxy.is_deaf = True

    async def states(self, table: str = "calls") -> list[str]:
        """The states of all calls on PostgreSQL, read past the proxy."""
        url = str(self.proxy._settings.url)
        async with await psycopg.AsyncConnection.connect(url) as connection:
            return [
                row[0] for row in await (await connection.execute(f"SELECT state FROM {table}")).fetchall()
            ]

    async def until(self, state: str, *, table: str = "calls") -> None:
        """Wait until the only call is in a state."""

        async def is_reached() -> bool:
            return await self.states(table) == [state]

        await eventually(is_reached, what=f"the row of {table} to be {state}")

    async def call(self, call_id: str) -> Call | None:
        """The row of a call."""
        while True:
            try:
                async with self.database.read() as tx:
                    return await tx.calls.find(call_id)
            except StorageUnavailableError:  # a connection that an outage broke
                await asyncio.sleep(0.05)

    async def is_sent_again(self, call_id: str) -> bool:
        """Whether the sweep would publish the call now or later."""
        async with self.database.begin() as tx:
            return call_id in {
                call.id for call in await tx.calls.take_unclaimed(waiting_seconds=-60, limit=100)
            }


@pytest.fixture(params=["sqlite", "postgres"])
async def storage(
    request: pytest.FixtureRequest, migrated_copy: Any, tmp_path: Path
) -> AsyncIterator[Storage]:
    settings, proxy = migrated_copy(request.param), None
    if request.param == "postgres":
        proxy = CutProxy(settings)
        settings = await proxy.start()
    storage = Storage(settings, tmp_path, proxy)
    yield storage
    storage.come_back()
    await storage.database.dispose()
    if proxy is not None:
        await proxy.stop()


#: For effects between processes only: SQLite confirms inside the caller's process.
on_postgres = pytest.mark.parametrize("storage", ["postgres"], indirect=True)


def entry(kind: SandboxMethodType) -> MethodEntry:
    """The called method."""
    return MethodEntry(
        name="f", task=METHOD, plugin_key="a.m", label="f", type=kind, signature="()", doc=None,
        lane=Lane.METHODS,
    )  # fmt: skip


class Caller:
    """The calling side, behind a relay to its broker; answers arrive on another connection."""

    def __init__(self, settings: Settings, relay: RedisRelay, database: Database) -> None:
        self.relay = relay
        self.settings = settings
        self.method = entry(SandboxMethodType.BEHAVIOR)
        self.app = create_app(settings)
        registry: Any = SimpleNamespace(find=lambda _name: self.method)
        self.caller = MethodCaller(self.app, settings, ledger=CallRecords(database, registry))
        self.client = redis.asyncio.Redis.from_url(settings.results.url or "", socket_timeout=30)
        self.queue = f"{settings.broker.key_prefix}methods"

    def begin(self, made: Invocation) -> asyncio.Task[Envelope]:
        """Start a call; its errors are of classes that callers can catch."""
        return asyncio.create_task(self._call(made))

    async def _call(self, made: Invocation) -> Envelope:
        try:
            return await self.caller.call(made, lane=Lane.METHODS)
        except Exception as exc:
            assert type(exc).__name__ in errors.__all__, f"{type(exc)} is not a documented class"
            raise

    async def sent(self, made: Invocation) -> tuple[asyncio.Task[Envelope], dict[str, Any]]:
        """Start a call and take its message."""
        calling = self.begin(made)
        return calling, await self.taken()

    async def lose_replies(self) -> None:
        """Let the broker execute commands from now on, and drop its replies."""
        assert self.caller._servers is not None
        await self.caller._servers.epoch(0)  # connects
        await self.client.script_load(PUSH.text)
        self.relay.mute()
        self.relay.is_mute = True

    def cut_off(self) -> None:
        """Break the connections whose replies are dropped; new ones work."""
        self.relay.is_mute = False
        self.relay.reset()

    async def taken(self) -> dict[str, Any]:
        """Receive the next message as a worker would; returns its headers and properties."""
        popped = await self.client.blpop([self.queue], 20)
        assert popped is not None
        message: dict[str, Any] = plain_json.load(popped[1])
        return message

    async def answer(self, message: dict[str, Any], record: dict[str, Any]) -> None:
        """Store a result and publish it to the caller, as a worker does."""
        call_id = message["headers"]["id"]
        raw = plain_json.dump({"task_id": call_id, **record})
        await self.client.set(self.app.backend.get_key_for_task(call_id), raw, ex=60)
        await self.client.publish(self.caller._channel, raw)

    async def succeed(self, message: dict[str, Any], made: Invocation) -> None:
        """Answer like a worker whose method returned."""
        await self.answer(message, {"status": "SUCCESS", "result": envelope(made).model_dump(mode="json")})

    async def refuse(self, message: dict[str, Any], error: type[Exception] = StorageUnavailableError) -> None:
        """Answer like a worker that did not start the call; by default because it could not claim it."""
        result = {
            "exc_type": error.__name__,
            "exc_module": "nekro_agent.errors",
            "exc_message": ["the database did not run the statement"],
        }
        await self.answer(message, {"status": "FAILURE", "result": result})


def invocation(seconds: float = 20) -> Invocation:
    now = datetime.now(UTC)
    return Invocation(
        call_id=new_id(), method=METHOD, chat_key="chat", container_key="k", issued_at=now,
        deadline=now + timedelta(seconds=seconds), args="",
    )  # fmt: skip


def envelope(made: Invocation, text: str = "done") -> Envelope:
    now = datetime.now(UTC)
    return Envelope.of(
        call_id=made.call_id, type=SandboxMethodType.BEHAVIOR, value=None, text=text, worker="w",
        started_at=now, finished_at=now,
    )  # fmt: skip


@pytest.fixture
async def relay(own_redis: Any) -> AsyncIterator[RedisRelay]:
    async with RedisRelay(own_redis.port) as relay:
        yield relay


async def opened(
    make_settings: Callable[..., Settings], own_redis: Any, relay: RedisRelay, database: Database
) -> Caller:
    settings = make_settings(
        broker={"url": relay.url, "socket_timeout_seconds": 1}, results={"url": own_redis.url}
    )
    caller = Caller(settings, relay, database)
    await caller.caller.start()
    return caller


@pytest.fixture
async def world(
    make_settings: Callable[..., Settings], own_redis: Any, relay: RedisRelay, storage: Storage
) -> AsyncIterator[Caller]:
    caller = await opened(make_settings, own_redis, relay, storage.database)
    yield caller
    storage.come_back()
    await caller.caller.close()
    await caller.client.aclose()
    caller.app.close()


async def claim(storage: Storage, made: Invocation) -> int:
    request = CallRequest(id=made.call_id, method=METHOD, type=SandboxMethodType.BEHAVIOR, chat_key="chat")
    async with storage.database.autocommit() as tx:
        granted = await tx.calls.claim(request, worker="w", lease_seconds=60)
    assert granted.verdict is ClaimVerdict.GRANTED
    return granted.fence


async def finish(storage: Storage, made: Invocation, fence: int) -> None:
    async with storage.database.begin() as tx:
        await tx.calls.finish(made.call_id, fence=fence, outcome=envelope(made).model_dump(mode="json"))


# --- a worker could not claim ------------------------------------------------------------------------------


@pytest.mark.extended
async def test_a_refused_call_is_withdrawn_before_its_caller_gets_the_error(
    world: Caller, storage: Storage
) -> None:
    made = invocation()
    calling, message = await world.sent(made)
    storage.go_away()
    await world.refuse(message)
    await asyncio.wait([calling], timeout=1.5)
    assert not calling.done(), "answered although the call may still run"
    storage.come_back()
    with pytest.raises(StorageUnavailableError):
        await calling
    assert not await storage.is_sent_again(made.call_id)


@pytest.mark.extended
async def test_a_refused_call_that_cannot_be_withdrawn_has_an_unknown_outcome(
    world: Caller, storage: Storage
) -> None:
    made = invocation(seconds=3)
    calling, message = await world.sent(made)
    storage.go_away()
    await world.refuse(message)
    with pytest.raises(OutcomeUnknownError):
        await calling


async def test_a_call_that_expired_in_the_queue_times_out_while_the_database_is_down(
    world: Caller, storage: Storage
) -> None:
    made = invocation(seconds=3)
    calling, message = await world.sent(made)
    storage.go_away()
    await world.refuse(message, CallTimeoutError)
    with pytest.raises(CallTimeoutError):
        await calling


async def test_a_caller_gets_the_recorded_outcome_whatever_the_worker_answered(
    world: Caller, storage: Storage
) -> None:
    made = invocation()
    calling, message = await world.sent(made)
    await finish(storage, made, await claim(storage, made))
    await world.refuse(message)
    assert (await calling).text == "done"


# --- the deadline passes before the answer arrives ----------------------------------------------------------


async def test_a_caller_gets_at_its_deadline_what_was_recorded_and_not_answered(
    world: Caller, storage: Storage
) -> None:
    made = invocation(seconds=3)
    calling, _ = await world.sent(made)
    await finish(storage, made, await claim(storage, made))
    assert (await calling).text == "done"


async def test_a_caller_gets_at_its_deadline_the_failure_that_was_recorded(
    world: Caller, storage: Storage
) -> None:
    made = invocation(seconds=3)
    calling, _ = await world.sent(made)
    fence = await claim(storage, made)
    async with storage.database.begin() as tx:
        await tx.calls.fail(made.call_id, fence=fence, error_type="ValueError", error_message="of the method")
    with pytest.raises(errors.MethodFailedError, match="of the method"):
        await calling


async def test_nothing_is_recorded_after_a_caller_was_told_that_time_is_over(
    world: Caller, storage: Storage
) -> None:
    made = invocation(seconds=3)
    calling, _ = await world.sent(made)
    fence = await claim(storage, made)
    with pytest.raises(CallTimeoutError):
        await calling
    with pytest.raises(FencedError):
        await finish(storage, made, fence)


async def test_a_deadline_that_passes_while_the_database_is_down_has_an_unknown_outcome(
    world: Caller, storage: Storage
) -> None:
    made = invocation(seconds=3)
    calling, _ = await world.sent(made)
    await finish(storage, made, await claim(storage, made))
    storage.go_away()
    with pytest.raises(OutcomeUnknownError):
        await calling


# --- a caller stops waiting ---------------------------------------------------------------------------------


class Leaving:
    """A call that runs, and whose caller waits for half a second."""

    def __init__(self, world: Caller, storage: Storage) -> None:
        self.made = invocation(seconds=10 * WAIT_SECONDS)
        self.attempts = 0
        self._storage = storage
        self.calling = asyncio.create_task(
            world.caller.call_or_detach(self.made, lane=Lane.METHODS, seconds=0.5, leave=self._leave)
        )

    async def _leave(self) -> bool:
        self.attempts += 1
        request = CallRequest(
            id=self.made.call_id, method=METHOD, type=SandboxMethodType.BEHAVIOR, chat_key="chat"
        )
        async with self._storage.database.begin() as tx:
            return (await tx.detached_calls.detach(request)).finished_at is None

    async def in_outage(self, world: Caller) -> dict[str, Any]:
        """Let a worker claim it, and its caller fail to leave in an outage; returns the message."""
        message = await world.taken()
        await claim(self._storage, self.made)
        self._storage.go_away()
        await eventually(lambda: self.attempts >= 2, what="two attempts to leave")
        assert not self.calling.done(), "it ended although the call runs"
        return message


async def test_a_call_whose_caller_cannot_leave_in_an_outage_is_left_after_it(
    world: Caller, storage: Storage
) -> None:
    leaving = Leaving(world, storage)
    await leaving.in_outage(world)
    storage.come_back()
    assert await leaving.calling is None
    row = await storage.call(leaving.made.call_id)
    assert row is not None and row.detached_at is not None and row.state is CallState.RUNNING


async def test_a_caller_that_cannot_leave_in_an_outage_gets_the_answer(
    world: Caller, storage: Storage
) -> None:
    leaving = Leaving(world, storage)
    message = await leaving.in_outage(world)
    await world.succeed(message, leaving.made)
    answer = await leaving.calling
    assert answer is not None and answer.text == "done"


# --- the broker's reply is lost ----------------------------------------------------------------------------


async def test_a_call_with_an_unconfirmed_publish_returns_its_recorded_outcome(
    world: Caller, storage: Storage
) -> None:
    made = invocation()
    await world.lose_replies()
    calling, _ = await world.sent(made)
    await finish(storage, made, await claim(storage, made))
    assert (await calling).text == "done"


async def test_a_call_with_an_unconfirmed_publish_is_waited_for_while_it_runs(
    world: Caller, storage: Storage
) -> None:
    made = invocation()
    await world.lose_replies()
    calling, _ = await world.sent(made)
    fence = await claim(storage, made)
    await asyncio.wait([calling], timeout=2.5)
    assert not calling.done()
    await finish(storage, made, fence)
    assert (await calling).text == "done"


async def test_a_call_that_runs_to_its_deadline_without_an_answer_has_an_unknown_outcome(
    world: Caller, storage: Storage
) -> None:
    made = invocation(seconds=4)
    await world.lose_replies()
    calling, _ = await world.sent(made)
    await claim(storage, made)
    with pytest.raises(OutcomeUnknownError):
        await calling


async def test_an_unclaimed_call_with_an_unconfirmed_publish_is_withdrawn(
    world: Caller, storage: Storage
) -> None:
    made = invocation()
    await world.lose_replies()
    with pytest.raises(BrokerUnavailableError):
        await world.begin(made)
    call = await storage.call(made.call_id)
    assert call is not None and call.state is CallState.CANCELLED
    assert not await storage.is_sent_again(made.call_id)


async def test_a_call_whose_reply_was_cut_off_is_published_again(world: Caller, storage: Storage) -> None:
    await world.lose_replies()
    made = invocation()
    calling, _ = await world.sent(made)
    world.cut_off()
    await world.succeed(await world.taken(), made)
    assert (await calling).text == "done"


async def test_a_tool_call_whose_reply_was_cut_off_is_sent_once_and_its_answer_waited_for(
    world: Caller, storage: Storage
) -> None:
    world.method = entry(SandboxMethodType.TOOL)
    made = invocation()
    await world.lose_replies()
    calling, message = await world.sent(made)
    world.cut_off()
    await asyncio.wait([calling], timeout=0.3)
    assert not calling.done()
    await world.succeed(message, made)
    assert (await calling).text == "done"
    assert await world.client.llen(world.queue) == 0  # type: ignore[misc]  # redis-py's types


async def test_a_tool_call_without_an_answer_after_a_lost_reply_has_an_unknown_outcome(
    world: Caller, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nekro.broker.calls.PUBLISH_SECONDS", 1)
    world.method = entry(SandboxMethodType.TOOL)
    await world.lose_replies()
    calling = world.begin(invocation())
    await world.taken()
    with pytest.raises(OutcomeUnknownError):
        await calling


async def test_a_refused_connection_is_retried(
    make_settings: Callable[..., Settings], own_redis: Any, relay: RedisRelay, storage: Storage
) -> None:
    settings = make_settings(broker={"url": own_redis.url}, results={"url": own_redis.url})
    caller = Caller(settings, relay, storage.database)
    own_redis.kill()
    async with caller.caller:
        sending = asyncio.create_task(caller.caller.send(invocation(), lane=Lane.METHODS))
        await asyncio.wait([sending], timeout=0.5)
        assert not sending.done()
        await asyncio.to_thread(own_redis.start)
        await sending
    caller.app.close()
    await caller.client.aclose()


# --- the database's confirmation is lost -------------------------------------------------------------------


@on_postgres
async def test_a_record_with_a_lost_confirmation_is_written_once_and_sent(
    world: Caller, storage: Storage
) -> None:
    await storage.lose_confirmations()
    made = invocation()
    calling = world.begin(made)
    await storage.until("queued")
    storage.break_connections()
    message = await world.taken()
    await world.succeed(message, made)
    assert (await calling).text == "done"


@on_postgres
async def test_a_record_in_doubt_is_an_unknown_outcome(
    world: Caller, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nekro.app.retried_writes.PUBLISH_SECONDS", 0.5)
    await storage.lose_confirmations()
    with pytest.raises(OutcomeUnknownError):
        await world.begin(invocation(seconds=4))


@on_postgres
async def test_a_record_in_doubt_is_withdrawn_before_its_caller_gets_an_error(
    world: Caller, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nekro.app.retried_writes.PUBLISH_SECONDS", 0.2)
    await storage.lose_confirmations()
    made = invocation()
    calling = world.begin(made)
    await storage.until("queued")
    await asyncio.wait([calling], timeout=2)
    assert not calling.done()
    storage.break_connections()
    with pytest.raises(StorageUnavailableError):
        await calling
    assert await storage.states() == ["cancelled"]


async def test_a_call_that_the_database_refuses_to_record_fails_at_once(
    world: Caller, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nekro.app.retried_writes.PUBLISH_SECONDS", 0.2)
    storage.go_away()
    made = invocation(seconds=10 * WAIT_SECONDS)
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(StorageUnavailableError):
            await world.begin(made)
    storage.come_back()
    assert await storage.call(made.call_id) is None


async def test_a_withdrawn_call_cannot_be_recorded_later(world: Caller, storage: Storage) -> None:
    made = invocation()
    ledger: Any = world.caller._ledger
    message = world.caller._message(made, "methods")
    await ledger.settle(message)
    await ledger.record(message)
    call = await storage.call(made.call_id)
    assert call is not None and call.state is CallState.CANCELLED


# --- workers -----------------------------------------------------------------------------------------------


class NoHooks:
    """A host without plugins: no hook blocks a text."""

    async def on_system_message(self, _chat_key: str, _text: str) -> bool:
        return False


OpenClaims = Callable[[SystemMessageHooks], CallClaims]


@pytest.fixture
async def open_claims(make_settings: Callable[..., Settings], storage: Storage) -> AsyncIterator[OpenClaims]:
    """Create the claims of a worker whose plugins have hooks for system messages."""
    background = BackgroundLoop(storage.database)
    app = create_app(make_settings())
    leases = LeaseKeeper(storage.database, background)
    check = ApprovalCheck(ApprovalSeal(SecretStr("test-signing-key")))

    def open_(hooks: SystemMessageHooks) -> CallClaims:
        return CallClaims(leases, EventPublisher(app), hooks, lease_seconds=60, confirm=check.confirm)

    yield open_
    storage.come_back()
    await asyncio.to_thread(background.close)
    app.close()


@pytest.fixture
def claims(open_claims: OpenClaims) -> CallClaims:
    return open_claims(NoHooks())


async def claimed(claims: CallClaims, made: Invocation) -> HeldClaim:
    return await claims.claim(entry(SandboxMethodType.BEHAVIOR), made, worker="methods@host:7")


async def test_a_worker_claims_again_when_the_database_is_available(
    storage: Storage, claims: CallClaims
) -> None:
    storage.go_away()
    claiming = asyncio.create_task(claimed(claims, invocation()))
    await asyncio.wait([claiming], timeout=1.5)
    assert not claiming.done()
    storage.come_back()
    assert (await claiming).fence == 1


async def test_a_call_that_could_not_be_claimed_before_its_deadline_does_not_start(
    storage: Storage, claims: CallClaims
) -> None:
    storage.go_away()
    with pytest.raises(CallTimeoutError, match="did not start"):
        await claimed(claims, invocation(seconds=2))


@on_postgres
async def test_a_claim_with_a_lost_confirmation_is_granted_again(
    storage: Storage, claims: CallClaims
) -> None:
    await storage.lose_confirmations()
    claiming = asyncio.create_task(claimed(claims, invocation()))
    await storage.until("running")
    storage.break_connections()
    assert (await claiming).envelope is None


async def test_a_call_that_ran_here_unrecorded_is_not_run_again_after_an_outage(
    storage: Storage,
    claims: CallClaims,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[tuple[str, dict[str, Any]]],
) -> None:
    monkeypatch.setattr(claims_module, "GRACE_SECONDS", 0.2)
    made = invocation()
    held = await claimed(claims, made)
    storage.go_away()
    with pytest.raises(OutcomeUnknownError, match="could not be recorded"):
        await claims.finish(held, made, envelope(made))
    assert dict(logged)["call_end_not_recorded"]["call_id"] == made.call_id
    again = asyncio.create_task(claimed(claims, made))
    await asyncio.wait([again], timeout=1.0)
    storage.come_back()
    with pytest.raises(claims_module.DuplicateDelivery):
        await again


@on_postgres
async def test_an_outcome_with_a_lost_confirmation_is_the_answer(
    storage: Storage, claims: CallClaims
) -> None:
    made = invocation()
    held = await claimed(claims, made)
    finishing = asyncio.create_task(_finish_unheard(storage, claims, held, made))
    assert (await finishing).text == "done"


async def _finish_unheard(
    storage: Storage, claims: CallClaims, held: HeldClaim, made: Invocation
) -> Envelope:
    finishing = asyncio.create_task(claims.finish(held, made, envelope(made)))
    while await storage.states() == ["running"] and not finishing.done():
        await asyncio.sleep(0)
    storage.break_connections()
    return await finishing


@pytest.mark.parametrize("returns", [True, False], ids=["returned", "raised"])
async def test_a_renewal_just_after_the_end_of_a_call_reports_no_loss(
    storage: Storage, claims: CallClaims, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    made, logged = invocation(), list[str]()
    held = await claimed(claims, made)
    begin = storage.database.begin

    @contextlib.asynccontextmanager
    async def begin_and_renew() -> AsyncIterator[Transaction]:
        async with begin() as transaction:
            yield transaction
        assert held.lease is not None
        with contextlib.suppress(FencedError):  # as the keeper does, on its own loop
            await held.lease.confirm()

    monkeypatch.setattr(storage.database, "begin", begin_and_renew)
    sink = logger.add(lambda line: logged.append(line.record["message"]))  # type: ignore[attr-defined]
    if returns:
        await claims.finish(held, made, envelope(made))
    else:
        await claims.fail(held, ValueError("raised"))
    logger.remove(sink)
    call = await storage.call(made.call_id)
    assert call is not None and call.state is (CallState.DONE if returns else CallState.FAILED)
    assert held.lease is not None and held.lease.is_lost
    assert "lease_lost" not in logged


class FailingHooks:
    """A host that cannot read the chat for the context of its hooks."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def on_system_message(self, _chat_key: str, _text: str) -> bool:
        raise self._error


class WaitingHooks:
    """A host with a hook that does not end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def on_system_message(self, _chat_key: str, _text: str) -> bool:
        self.begun.set()
        await asyncio.Event().wait()
        return False


async def texts(storage: Storage) -> list[str]:
    async with storage.database.read() as tx:
        return [message.text for message in await tx.messages.newest("chat", limit=9)]


@pytest.mark.parametrize("error", [StorageUnavailableError("no connection"), RuntimeError("unexpected")])
async def test_a_call_is_recorded_although_the_hooks_of_its_message_fail(
    storage: Storage, open_claims: OpenClaims, error: Exception
) -> None:
    claims, made = open_claims(FailingHooks(error)), invocation()
    held = await claimed(claims, made)
    assert (await claims.finish(held, made, envelope(made))).text == "done"
    call = await storage.call(made.call_id)
    assert call is not None and call.state is CallState.DONE
    assert await texts(storage) == ["done"]
    again = await claimed(claims, made)
    assert again.envelope is not None and again.envelope.text == "done"


async def test_a_call_that_is_stopped_during_the_hooks_of_its_message_is_recorded(
    storage: Storage, open_claims: OpenClaims
) -> None:
    hooks, made = WaitingHooks(), invocation()
    claims = open_claims(hooks)
    held = await claimed(claims, made)
    finishing = asyncio.create_task(claims.finish(held, made, envelope(made)))
    await hooks.begun.wait()
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    call = await storage.call(made.call_id)
    assert call is not None and call.state is CallState.DONE
    assert await texts(storage) == ["done"]
    again = await claimed(claims, made)
    assert again.envelope is not None and again.envelope.text == "done"


@on_postgres
async def test_a_call_that_is_detached_while_its_end_is_recorded_does_not_deadlock(
    storage: Storage, make_settings: Callable[..., Settings], claims: CallClaims
) -> None:
    made, app = invocation(), create_app(make_settings())
    held = await claimed(claims, made)
    url = str(storage.proxy._settings.url)

    async def waits() -> bool:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            found = await connection.execute(
                "SELECT 1 FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            return await found.fetchone() is not None

    patient = Database(storage.proxy._settings, Path())
    detacher = CallDetacher(patient, EventPublisher(app))
    async with patient.begin() as tx:
        await tx.chats.ensure("chat")
    async with patient.begin() as ending:
        await ending.chats.lock("chat", create=True)  # as a worker that writes the call's text
        detaching = asyncio.create_task(
            detacher.detach(entry(SandboxMethodType.BEHAVIOR), made, lane="methods")
        )
        await eventually(waits, what="the detaching transaction to wait")
        outcome = envelope(made).model_dump(mode="json")
        await ending.calls.finish(made.call_id, fence=held.fence, outcome=outcome)
    assert (await detaching).state is CallState.DONE
    await patient.dispose()
    app.close()


# --- jobs ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def jobs(make_settings: Callable[..., Settings], storage: Storage) -> AsyncIterator[SqlJobs]:
    app, background = create_app(make_settings()), BackgroundLoop(storage.database)
    yield SqlJobs(storage.database, background, EventPublisher(app))
    storage.come_back()
    await asyncio.to_thread(background.close)
    app.close()


def started(jobs: SqlJobs) -> asyncio.Task[JobInfo]:
    request = JobRequest(plugin_key="a.m", chat_key="chat", task_type="t", task_id="once", args=(), kwargs={})
    return asyncio.create_task(jobs.start(request))


async def test_a_job_is_started_once_through_a_short_outage(storage: Storage, jobs: SqlJobs) -> None:
    storage.go_away()
    starting = started(jobs)
    await asyncio.wait([starting], timeout=1.5)
    assert not starting.done()
    storage.come_back()
    info = await starting
    async with storage.database.read() as tx:
        assert [job.id for job in await tx.jobs.newest(limit=9)] == [info.id]


@on_postgres
async def test_a_job_whose_record_was_not_confirmed_is_the_one_that_runs(
    storage: Storage, jobs: SqlJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = PostgresConnection.commit

    async def commit_unconfirmed(connection: PostgresConnection) -> None:
        storage.proxy.is_deaf = True
        await commit(connection)

    monkeypatch.setattr(PostgresConnection, "commit", commit_unconfirmed)
    starting = started(jobs)
    await storage.until("queued", table="jobs")
    monkeypatch.undo()
    storage.break_connections()
    info = await starting
    async with storage.database.read() as tx:
        assert [job.id for job in await tx.jobs.newest(limit=9)] == [info.id]


# --- budgets ------------------------------------------------------------------------------------------------


async def test_a_spending_is_settled_after_a_short_outage(
    make_settings: Callable[..., Settings], storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, begin = list[None](), storage.database.begin
    app = create_app(make_settings())
    spending = Spending(storage.database, EventPublisher(app), BudgetSettings(day={"tokens": 1000}))
    used = ModelUse(prompt_tokens=5, requests=1)
    estimate = ModelUse(prompt_tokens=100)
    meter = spending.meter(NewSpending(id="s", day="2026-01-01", use=estimate))
    await meter.admit()
    meter.add(used)

    def begin_counted() -> Any:
        attempts.append(None)
        return begin()

    monkeypatch.setattr(storage.database, "begin", begin_counted)
    monkeypatch.setattr("nekro.app.retried_writes.PUBLISH_SECONDS", WAIT_SECONDS)
    storage.go_away()
    settling = asyncio.create_task(meter.settle_alone())
    await eventually(lambda: len(attempts) > 3, what="several attempts")
    storage.come_back()
    await settling
    async with storage.database.read() as tx:
        (total,) = await tx.spendings.totals([ScopeKey.of(BudgetScope.DAY, "", day="2026-01-01")])
    assert total.tokens == 5
    app.close()


class OfPlugin:
    """What a plugin raises."""

    class CallTimeoutError(Exception):
        """Called like one of ours."""


@pytest.mark.parametrize(
    ("raised", "expected"),  # None: as it was raised
    [
        (CallTimeoutError("a.m.f: call c1 was stopped at its time limit"), None),
        (errors.MethodFailedError("KeyError", "'x'"), None),
        (ValueError("of the method"), errors.MethodFailedError("ValueError", "of the method")),
        (
            OfPlugin.CallTimeoutError("its own"),
            errors.MethodFailedError(f"{__name__}.CallTimeoutError", "its own"),
        ),
    ],
    ids=["time-limit", "method-failed", "value", "called-like-ours"],
)
async def test_a_caller_gets_the_error_that_was_recorded(
    storage: Storage, claims: CallClaims, raised: Exception, expected: Exception | None
) -> None:
    made = invocation()
    await claims.fail(await claimed(claims, made), raised)
    with pytest.raises(type(expected or raised)) as caught:
        await claimed(claims, made)
    assert str(caught.value) == str(expected or raised)


async def test_a_call_that_never_started_has_timed_out(database: Database) -> None:
    past = datetime.now(UTC) - timedelta(seconds=5)
    request = CallRequest(
        id="c1", method=METHOD, type=SandboxMethodType.TOOL, chat_key="chat", deadline=past, invocation={}
    )
    async with database.begin() as tx:
        await tx.calls.enqueue(request)
        (ended,) = await tx.calls.sweep_expired(limit=9)
    assert type(error_of(ended)) is CallTimeoutError
