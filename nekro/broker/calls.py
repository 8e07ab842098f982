"""Calls plugin methods from an event loop: publishes the call, waits, and returns the envelope or raises.

One ``MethodCaller`` serves all calls of a process. Workers store results and announce them on its channel.
A short announcement contains the result. A long result is read under its key, and so are those whose
announcement may have been missed: after each subscription, and regularly for calls that take long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from loguru import logger
from pydantic import ValidationError

from broker_config.embedded import resolve_signing_key
from broker_config.keys import Keys
from broker_config.redis_library import redis
from broker_config.settings import Settings
from nekro.base.deadlines import TimeLimits
from nekro.broker.call_servers import CallServers
from nekro.broker.delivery.fair_queue import owners_of
from nekro.broker.delivery.messages import CallMessage
from nekro.broker.failures import failure_from_record
from nekro.broker.fairness import LARGE_CHARS, ChatPace, ChatShares
from nekro.broker.program_calls import Marked, ProgramCall
from nekro.broker.publishing import PublishUnknownError, unavailable
from nekro.broker.redis.losses import Place
from nekro.broker.tracing import span, trace_headers
from nekro.wire import plain_json
from nekro.wire.invocation import Envelope, Invocation, Signer, new_id, refuse_version
from nekro.wire.seals import TASK, Seal
from nekro_agent.durations import (
    CLOSE_STEP_SECONDS,
    FRESH_SECONDS,
    PUBLISH_SECONDS,
    REFRESH_SECONDS,
    RETRY_SECONDS,
)
from nekro_agent.errors import (
    BrokerError,
    BrokerUnavailableError,
    CallTimeoutError,
    MessageRefusedError,
    MethodFailedError,
    NekroError,
    OutcomeUnknownError,
    StorageError,
    StorageUnavailableError,
)
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["CallFate", "CallLedger", "MethodCaller", "RecordUnknownError", "envelope_of"]

#: Result keys read with one command.
REREAD_KEYS: Final = 100
#: Time that a message takes on a worker's loop before its arguments are decoded, per character.
SECONDS_PER_CHAR: Final = 1e-8

#: How long after its deadline a call's row is asked for its outcome.
LAST_LOOK_SECONDS: Final = 2.0

_LANES: Final = frozenset(lane.value for lane in Lane)
#: Celery's states of a task that has ended.
_SUCCESS: Final = "SUCCESS"
_READY: Final = frozenset((_SUCCESS, "FAILURE", "REVOKED"))


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFate:
    """The state of a recorded call; with no field set it will never run."""

    is_running: bool = False
    #: The envelope of a call that returned.
    outcome: dict[str, Any] | None = None
    #: The error of a call that failed or was cancelled.
    error: NekroError | None = None


class RecordUnknownError(StorageUnavailableError):
    """The database failed before it confirmed the write of a call, so the ledger may contain it."""


class CallLedger(Protocol):
    """Durable records of calls that must survive the loss of their message."""

    def records(self, message: CallMessage) -> bool:
        """Whether calls of this kind are recorded."""
        ...

    async def record(self, message: CallMessage, *, note: str = "") -> None:
        """Record a call before it is published.

        Args:
            note: see ``nekro.broker.program_calls``.

        Raises:
            StorageUnavailableError: the database does not answer; the call is not recorded.
            RecordUnknownError: the database does not answer; the call may be recorded.
        """
        ...

    async def settle(self, message: CallMessage) -> CallFate:
        """Withdraw a call that has not started, recorded or not; otherwise return its state.

        Raises:
            StorageError: the database does not answer.
        """
        ...

    async def withdraw(self, call_id: str) -> None:
        """Prevent a call from starting, and a running one from recording its results."""
        ...


@dataclass(kw_only=True)
class _Pending:
    """A call that waits for its reply."""

    message: CallMessage
    since: float
    #: The result record that a worker stored; None until it arrives.
    record: dict[str, Any] | None = None
    #: Completed when the record arrives; None while no task waits for it.
    waiter: asyncio.Future[None] | None = None
    is_cancelled: bool = False
    #: Whether the ledger has it, or may have it.
    is_recorded: bool = False
    #: Whether it may have started, or may still start, although sending or answering it failed.
    is_in_doubt: bool = False
    #: Position of the message in the broker; None if it is unpublished or the broker is durable.
    place: Place | None = None
    #: Number of the server that has the message.
    server: int = 0
    #: Whether its caller waits for the answer in this process.
    is_awaited: bool = True
    #: The call in its program; None: it is of no program that may be run again.
    program: ProgramCall | None = None
    #: Headers that continue the trace in the worker, also when the message is sent again.
    trace: Mapping[str, str] = field(default_factory=dict)

    def settle(self, record: dict[str, Any]) -> None:
        """Accept a worker's result record; later records are ignored."""
        if self.record is None:
            self.record = record
            if self.waiter is not None and not self.waiter.done():
                self.waiter.set_result(None)

    def cancel(self) -> None:
        """Cancel the present wait, or the next one."""
        self.is_cancelled = True
        if self.waiter is not None:
            self.waiter.cancel()

    async def answer(self) -> dict[str, Any]:
        """Wait for the result record; can be called again after an interrupted wait."""
        if self.is_cancelled:
            raise asyncio.CancelledError
        if self.record is None:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        assert self.record is not None  # noqa: S101 - set before the waiter is completed
        return self.record


class MethodCaller:
    """Calls methods over the broker; ``start`` and ``close`` it on the loop that uses it."""

    def __init__(
        self, app: Celery | Callable[[], Celery], settings: Settings, *, ledger: CallLedger | None = None
    ) -> None:
        """Create a caller.

        Args:
            app: the application, or a function that builds it: on Redis only revocations need it, and
                importing Celery takes longer than a call.
        """
        self._make_app = app if callable(app) else lambda: app
        self._seal = Seal(resolve_signing_key(settings), purpose=TASK)
        self._keys = Keys(prefix=settings.broker.key_prefix)
        self._ledger = ledger
        self._settings = settings
        self._signer = Signer.from_text(resolve_signing_key(settings).get_secret_value())
        self._caller_id = new_id()
        self._channel = Keys(prefix=settings.broker.key_prefix).reply(self._caller_id)
        self._pending: dict[str, _Pending] = {}
        self._shares = ChatShares(per_chat=settings.broker.calls_per_chat, waiting=settings.broker.max_queued)
        self._pace = ChatPace(only_beside_others=False)
        self._servers: CallServers | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reads: set[asyncio.Task[None]] = set()
        self._revocations: set[asyncio.Task[None]] = set()
        self._leaves_calls = False
        #: Chats whose calls run on without a waiter.
        self._left_chats: set[str] = set()

    async def start(self) -> None:
        """Start listening for results. Redis need not be reachable yet; the tasks retry."""
        if self._tasks:
            return
        self._servers = servers = CallServers(
            self._make_app,
            self._settings,
            self._channel,
            on_announced=self._on_announced,
            on_subscribed=self._read_all_soon,
        )
        self._limits = TimeLimits()
        self._tasks = [
            asyncio.create_task(self._recover_forever(number), name="nekro-recovery")
            for number in range(len(servers))
        ] + [
            asyncio.create_task(servers.listen(number), name="nekro-answers")
            for number in servers.with_results
        ]

    def leave_calls(self) -> None:
        """From now on, let calls run whose wait is cancelled: the same call, made again, finds the effect."""
        self._leaves_calls = True

    @contextlib.contextmanager
    def leaving(self, chat_key: str) -> Iterator[None]:
        """Let the calls of a chat run whose wait is cancelled in the block, as ``leave_calls`` does."""
        self._left_chats.add(chat_key)
        try:
            yield
        finally:
            self._left_chats.discard(chat_key)

    async def close(self) -> None:
        """Stop listening, and cancel every waiting call."""
        tasks, self._tasks = self._tasks, []
        for pending in self._pending.values():
            pending.cancel()
        await asyncio.sleep(0)  # the cancelled waits revoke their calls
        if self._revocations:  # cancelled, a withdrawal could outlive the event loop
            await asyncio.wait(self._revocations, timeout=CLOSE_STEP_SECONDS)
        if self._servers is not None:
            self._servers.stop_listening()
        await _end({*tasks, *self._reads, *self._revocations})
        if self._servers is not None:
            await self._servers.close()
            self._limits.close()
        self._servers = None

    async def __aenter__(self) -> MethodCaller:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, invocation: Invocation, *, lane: Lane | str) -> Envelope:
        """Run a method on a worker and return its envelope.

        When the broker has lost its data, the message is sent again with the same id. Cancelling the wait
        revokes the call, because its result is no longer needed.

        Args:
            lane: a lane, or the name of a pinned plugin's queue. An unknown name raises
                ``KeyError``: queues are declared in settings.

        Raises:
            BrokerUnavailableError: the broker does not answer within about 6 s; the call will not run.
            StorageUnavailableError: the database does not answer; the call will not run.
            OutcomeUnknownError: broker or database failed, and whether the call ran is not known.
            OverloadedError: the queue is full, or too many calls wait here; the call will not run.
            CallTimeoutError: the deadline passed, in the queue or while the method ran. The
                worker is requested to stop the call.
            CallCancelledError: the call was revoked.
            MethodFailedError: the method raised; the error names the plugin's exception.
            MethodNotFoundError, ArgumentError, ResultError, …: the worker raised this error
                of our tree.
            MessageRefusedError: the answer is not an envelope of this call, or a call with this
                id is already in progress here.
        """
        envelope = await self.call_or_detach(invocation, lane=lane)
        assert envelope is not None  # noqa: S101 - without ``leave`` it does not stop waiting
        return envelope

    async def call_or_detach(
        self,
        invocation: Invocation,
        *,
        lane: Lane | str,
        seconds: float = 0,
        leave: Callable[[], Awaitable[bool]] | None = None,
        program: ProgramCall | None = None,
    ) -> Envelope | None:
        """Run a method as ``call`` does, but with a limited wait; None: the call continues without a waiter.

        Args:
            seconds: how long to wait after sending, at most until the deadline; unused without ``leave``.
            leave: called when that time is over; returns whether to stop waiting. It is called again, and
                the answer awaited meanwhile, if it raises StorageUnavailableError. None: the wait has no
                other limit than the deadline.
            program: the call in its program; if that has made it before, it is not sent again.

        Raises:
            The errors of ``call``, and others of ``leave``.
        """
        call_id = invocation.call_id
        if self._servers is None:
            raise RuntimeError("MethodCaller.call before start or after close")
        if call_id in self._pending:
            raise MessageRefusedError(f"call {call_id} is already in progress")
        queue = _queue_of(lane)
        remaining = invocation.remaining_seconds()
        if remaining <= 0:
            raise CallTimeoutError(f"{invocation.method}: the deadline of call {call_id} has passed")
        pending = _Pending(message=self._message(invocation, queue), since=time.monotonic(), program=program)
        self._pending[call_id] = pending
        limit = self._limits.of(remaining)
        try:
            with limit:
                async with self._shares.turn(invocation.chat_key):
                    await self._keep_pace(invocation)
                    with span("publish", {"lane": queue, "call_id": call_id}, kind="producer"):
                        await self._send(pending)
                    if leave is not None and await self._is_left(pending, seconds, leave):
                        return None
                    answer = await self._confirmed(pending, await pending.answer())
        except TimeoutError as exc:
            if not limit.is_over:
                raise
            outcome = await self._outcome_at_deadline(pending)
            if outcome is None:
                self._revoke_soon(call_id)
                if pending.is_in_doubt:
                    raise _in_doubt(invocation) from exc
                raise CallTimeoutError(
                    f"{invocation.method}: no answer to call {call_id} before its deadline"
                ) from exc
            answer = _returned(outcome)
        except asyncio.CancelledError:
            if not (self._leaves_calls or invocation.chat_key in self._left_chats):
                # ``wait`` leaves the revocation running when this task is cancelled again.
                await asyncio.wait({self._revoke_soon(call_id)})
            raise
        finally:
            if self._pending.get(call_id) is pending:  # no answer came
                del self._pending[call_id]
        return envelope_of(answer, invocation.call_id)

    async def _keep_pace(self, invocation: Invocation) -> None:
        """Space out a chat's long messages, because workers verify and parse them on their event loop."""
        chars = len(invocation.args)
        if chars > LARGE_CHARS:
            await self._pace.turn(invocation.chat_key)
            self._pace.spent(invocation.chat_key, chars * SECONDS_PER_CHAR)

    async def _is_left(self, pending: _Pending, seconds: float, leave: Callable[[], Awaitable[bool]]) -> bool:
        while not await self._is_answered_within(pending, seconds):
            try:
                return await leave()
            except StorageUnavailableError as exc:
                # The call runs on, so its caller waits on: an error would invite it to make the call again.
                call_id = pending.message.invocation.call_id
                logger.bind(call_id=call_id, error=str(exc)).warning("call_not_detached")
            seconds = RETRY_SECONDS
        return False

    async def _is_answered_within(self, pending: _Pending, seconds: float) -> bool:
        try:
            with self._limits.of(seconds):
                await pending.answer()
        except TimeoutError:
            return pending.record is not None
        return True

    async def send(
        self, invocation: Invocation, *, lane: Lane | str, program: ProgramCall | None = None
    ) -> None:
        """Publish a call without waiting for its result.

        Args:
            program: as in ``call_or_detach``.

        Raises:
            OverloadedError: the queue is full; the call will not run.
            BrokerUnavailableError, StorageUnavailableError: broker or database do not answer; the call
                will not run.
            OutcomeUnknownError: broker or database do not answer; the call may run.
        """
        if self._servers is None:
            raise RuntimeError("MethodCaller.send before start or after close")
        queue = _queue_of(lane)
        message = CallMessage.of(invocation, signer=self._signer, lane=queue, reply_to=None)
        pending = _Pending(message=message, since=time.monotonic(), is_awaited=False, program=program)
        with span("publish", {"lane": queue, "call_id": invocation.call_id}, kind="producer"):
            try:
                with self._limits.of(max(invocation.remaining_seconds(), 0)) as limit:
                    await self._send(pending)
            except TimeoutError as exc:
                if not limit.is_over:
                    raise
                raise _in_doubt(invocation) from exc

    async def marks(self, chat_key: str, program_id: str) -> dict[str, Marked]:
        """Return the marks of the calls that a program has sent, by call id.

        Raises:
            BrokerUnavailableError: the broker does not answer.
        """
        if self._servers is None:
            raise RuntimeError("MethodCaller.marks before start or after close")
        try:
            return await self._servers.marks(chat_key, program_id)
        except (redis.RedisError, OSError) as exc:
            raise unavailable(self._settings.broker.url, exc) from exc

    async def results(self, chat_key: str, call_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the stored results of calls of a chat by call id; those that are not stored are left out.

        Raises:
            BrokerUnavailableError: Redis does not answer.
        """
        if self._servers is None:
            raise RuntimeError("MethodCaller.results before start or after close")
        found: dict[str, dict[str, Any]] = {}
        try:
            for number in self._servers.with_results:
                for start in range(0, len(call_ids), REREAD_KEYS):
                    ids = call_ids[start : start + REREAD_KEYS]
                    keys = [self._keys.result(call_id) for call_id in ids]
                    raws = await self._servers.read(number, keys)
                    found |= {one: plain_json.load(raw) for one, raw in zip(ids, raws, strict=True) if raw}
        except (redis.RedisError, OSError) as exc:
            raise unavailable(self._settings.broker.url, exc) from exc
        return {one: record for one, record in found.items() if record.get("status") in _READY}

    def forget(self, chat_key: str, program_id: str) -> None:
        """Delete the marks of a program that is not run again."""
        if self._servers is not None:
            self._servers.forget(chat_key, program_id)

    async def revoke(self, call_id: str) -> None:
        """Make all workers, including those that start later, drop a call or stop it.

        Raises:
            BrokerUnavailableError: the broker does not answer.
        """
        await self._withdraw(call_id)
        loop = asyncio.get_running_loop()

        def send() -> None:
            from nekro.broker.celery.remote_control import revoke

            revoke(self._make_app(), [call_id])

        sending = loop.run_in_executor(None, send)
        try:
            async with asyncio.timeout(PUBLISH_SECONDS):
                await sending
        except Exception as exc:
            raise unavailable(self._settings.broker.url, exc) from exc

    def _message(self, invocation: Invocation, queue: str) -> CallMessage:
        return CallMessage.of(invocation, signer=self._signer, lane=queue, reply_to=self._caller_id)

    async def _send(self, pending: _Pending) -> None:
        """Record a call and publish it; after a failure, withdraw it or wait for its answer."""
        pending.trace = trace_headers()
        ledger = self._ledger
        pending.is_recorded = ledger is not None and ledger.records(pending.message)
        try:
            if ledger is not None and pending.is_recorded:
                note = "" if pending.program is None else pending.program.note
                await ledger.record(pending.message, note=note)
            await self._put(pending)
        except (BrokerError, RecordUnknownError) as exc:
            await self._settle_unsent(pending, exc)

    async def _put(self, pending: _Pending) -> None:
        assert self._servers is not None  # noqa: S101 - checked by the callers
        task, invocation = pending.message.sealed(self._seal), pending.message.invocation
        task.headers.update(pending.trace)
        # The claim makes a second copy of a recorded call harmless.
        pending.server, sent = await self._servers.send(
            task,
            chat_key=invocation.chat_key,
            queue=pending.message.lane,
            may_repeat=pending.is_recorded,
            owners=owners_of(invocation.method, invocation.chat_key),
            program=pending.program,
        )
        pending.place = sent.place
        if sent.is_repeated:  # its result, which may be there, was announced to an earlier caller
            self._read_soon(pending.server, [invocation.call_id])

    async def _settle_unsent(self, pending: _Pending, error: NekroError) -> None:
        """Raise ``error`` if the call will not run; return if its answer has arrived or will arrive."""
        if not pending.is_recorded:
            if not isinstance(error, PublishUnknownError):
                raise error
            await self._wait_for_unrecorded(pending, error)
            return
        pending.is_in_doubt = True
        while (fate := await self._fate(pending)) is not None and fate.is_running:
            if not pending.is_awaited:
                return
            await asyncio.sleep(REFRESH_SECONDS)
        if fate is None:
            return
        if fate.outcome is None:
            raise fate.error or _as_documented(error) from error
        pending.settle(_returned(fate.outcome))

    async def _wait_for_unrecorded(self, pending: _Pending, error: NekroError) -> None:
        """Wait for the answer to an unrecorded call for the remaining time of a publish."""
        invocation = pending.message.invocation
        if pending.is_awaited:
            rest_seconds = pending.since + PUBLISH_SECONDS - time.monotonic()
            # The message may have arrived just now: its answer gets a second or so in any case.
            with contextlib.suppress(TimeoutError), self._limits.of(max(rest_seconds, PUBLISH_SECONDS / 6)):
                await pending.answer()
                return
            self._revoke_soon(invocation.call_id)
        raise _in_doubt(invocation) from error

    async def _fate(self, pending: _Pending) -> CallFate | None:
        """Query the ledger for a call's state until it answers; None: the call's answer came meanwhile.

        The call's deadline ends the wait.
        """
        assert self._ledger is not None  # noqa: S101 - it was recorded
        known = pending.record
        while pending.record is known:
            try:
                return await self._ledger.settle(pending.message)
            except StorageError as exc:
                logger.bind(call_id=pending.message.invocation.call_id, error=str(exc)).warning(
                    "call_in_doubt"
                )
            await asyncio.sleep(REFRESH_SECONDS)
        return None

    async def _confirmed(self, pending: _Pending, answer: dict[str, Any]) -> dict[str, Any]:
        """Compare a failure with the call's row, and prevent the call from being sent again later."""
        if not pending.is_recorded or answer["status"] == _SUCCESS:
            return answer
        error, invocation = failure_from_record(answer), pending.message.invocation
        # A worker that reports a timeout did not start the call, and no other worker starts it any more.
        pending.is_in_doubt = not isinstance(error, CallTimeoutError | MethodFailedError)
        # A call whose method raised was claimed by a worker and is not sent again.
        fate = None if isinstance(error, MethodFailedError) else await self._fate(pending)
        if fate is not None and fate.outcome is not None:
            return _returned(fate.outcome)
        if fate is not None and isinstance(error, StorageError | BrokerError):
            if fate.is_running:
                raise _in_doubt(invocation) from error
            if fate.error is not None:
                raise fate.error from error
        if fate is None or (fate.is_running and not isinstance(error, OutcomeUnknownError)):
            await self._withdraw(invocation.call_id)
        return answer

    async def _outcome_at_deadline(self, pending: _Pending) -> dict[str, Any] | None:
        """End a recorded call whose deadline has passed; returns its outcome if it returned before.

        Its worker may have died, or its answer may have been lost, after the outcome was recorded.

        Raises:
            NekroError: how the call ended before.
        """
        if self._ledger is None or not pending.is_recorded:
            return None
        invocation = pending.message.invocation
        try:
            with self._limits.of(LAST_LOOK_SECONDS):
                # Then it cannot be recorded as done after its caller was told otherwise.
                await self._ledger.withdraw(invocation.call_id)
                fate = await self._ledger.settle(pending.message)
        except (StorageError, TimeoutError) as exc:
            logger.bind(call_id=invocation.call_id, error=str(exc)).warning("call_in_doubt")
            # A worker that reports a timeout did not start the call, and no other worker starts it any more.
            pending.is_in_doubt = pending.is_in_doubt or pending.record is None
            return None
        if fate.error is not None:
            raise fate.error
        return fate.outcome

    async def _withdraw(self, call_id: str) -> None:
        if self._ledger is None:
            return
        try:
            await self._ledger.withdraw(call_id)
        except StorageError as exc:  # the call ends at its deadline
            logger.bind(call_id=call_id, error=str(exc)).warning("call_not_withdrawn")

    def _revoke_soon(self, call_id: str) -> asyncio.Task[None]:
        async def revoke() -> None:
            try:
                await self.revoke(call_id)
            except Exception as exc:  # the worker stops the call at its deadline anyway
                logger.bind(call_id=call_id, error=str(exc)).warning("call_not_revoked")

        task = asyncio.create_task(revoke())
        self._revocations.add(task)
        task.add_done_callback(self._revocations.discard)
        return task

    async def _recover_forever(self, number: int) -> None:
        """Recover old calls of a server whose announcement was lost, or whose message was lost by Redis."""
        while True:
            await asyncio.sleep(FRESH_SECONDS)
            calls = self._calls_of(number, before=time.monotonic() - FRESH_SECONDS)
            try:
                await self._read(number, calls)
                if calls:
                    await self._send_lost_again(number)
            except (redis.RedisError, OSError, BrokerError) as exc:
                logger.bind(error=str(exc)).debug("pending_calls_not_recovered")
            except Exception:  # all calls depend on this task
                logger.exception("pending_calls_not_recovered")

    def _calls_of(self, number: int, *, before: float = float("inf")) -> list[str]:
        """Return the calls whose answers a server may have.

        The first server may have any: a call that was sent elsewhere is answered from there.
        """
        return [
            call_id
            for call_id, pending in self._pending.items()
            if pending.since <= before and (not number or pending.server == number)
        ]

    async def _read(self, number: int, calls: Sequence[str]) -> None:
        """Read the stored results of calls.

        Raises:
            RedisError, OSError: Redis does not answer.
        """
        assert self._servers is not None  # noqa: S101 - set while the tasks run
        if number not in self._servers.with_results:
            return
        for start in range(0, len(calls), REREAD_KEYS):
            keys = [self._keys.result(call_id) for call_id in calls[start : start + REREAD_KEYS]]
            for raw in await self._servers.read(number, keys):
                if raw is not None:
                    self._on_announced(number, raw)

    def _read_soon(self, number: int, calls: Sequence[str]) -> None:
        async def read() -> None:
            try:
                await self._read(number, calls)
            except (redis.RedisError, OSError) as exc:  # the regular reading finds them
                logger.bind(error=str(exc)).debug("results_not_read")

        if calls:
            task = asyncio.create_task(read())
            self._reads.add(task)
            task.add_done_callback(self._reads.discard)

    def _read_all_soon(self, number: int) -> None:
        self._read_soon(number, self._calls_of(number))

    async def _send_lost_again(self, number: int) -> None:
        """Publish calls again that a server has lost; TOOL calls are known only to this process."""
        assert self._servers is not None  # noqa: S101 - set while the tasks run
        epoch = await self._servers.epoch(number)
        if epoch is None:
            return
        lost = []
        for pending in self._pending.values():
            if pending.server != number or pending.place is None or pending.record is not None:
                continue
            if epoch.has(pending.place):
                pending.place = epoch.moved(pending.place)
            else:
                lost.append(pending)
        if lost:
            logger.bind(calls=len(lost)).warning("lost_calls_republished")
        for pending in lost:
            await self._put(pending)

    def _on_announced(self, number: int, raw: bytes) -> None:
        """Pass a result to the call that waits for it; read a long one; drop anything else."""
        try:
            record = plain_json.load(raw)
        except ValueError:
            logger.bind(bytes=len(raw)).warning("announcement_unreadable")
            return
        call_id = str(record.get("task_id")) if isinstance(record, dict) else ""
        if call_id not in self._pending:
            return
        if "status" not in record:
            self._read_soon(number, [call_id])
        elif record["status"] in _READY:
            self._pending.pop(call_id).settle(record)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel tasks until they end: a cancellation is lost if it coincides with a timeout inside redis-py."""
    while pending := {task for task in tasks if not task.done()}:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.1)


def _queue_of(lane: Lane | str) -> str:
    """Return the queue of a lane, or of a pinned plugin.

    Raises:
        KeyError: there is no such lane.
    """
    name = str(lane)
    if name not in _LANES and not name.startswith(f"{Lane.PINNED.value}."):
        raise KeyError(name)
    return name


def _returned(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the record that a worker stores for a call that returned."""
    return {"status": _SUCCESS, "result": outcome}


def _as_documented(error: NekroError) -> NekroError:
    """Return an error of the documented class; subclasses in this package carry internal detail."""
    documented = (BrokerUnavailableError, StorageUnavailableError)
    kind = next((kind for kind in documented if isinstance(error, kind)), None)
    return error if kind is None else kind(str(error))


def _in_doubt(invocation: Invocation) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"call {invocation.call_id} of {invocation.method}: the broker or the database failed meanwhile, so "
        "it may or may not have run; check before you repeat it"
    )


def envelope_of(record: Mapping[str, Any], call_id: str | None = None) -> Envelope:
    """Return what a call returned, from the result that a worker stored.

    Args:
        call_id: the call that it must be of; None: the one that it names.

    Raises:
        MessageRefusedError: it is no result of this call.
        NekroError: the error of a call that failed.
    """
    if record["status"] != _SUCCESS:
        raise failure_from_record(record)
    call_id, answer = call_id or str(record.get("task_id")), record.get("result")
    if isinstance(answer, dict) and "version" in answer:
        refuse_version(answer, what=f"answer to call {call_id}")
    try:
        envelope = Envelope.model_validate(answer)
    except ValidationError as exc:
        raise MessageRefusedError(f"call {call_id}: the worker returned an invalid envelope") from exc
    if envelope.call_id != call_id:
        raise MessageRefusedError(f"call {call_id}: the answer belongs to {envelope.call_id}")
    return envelope
