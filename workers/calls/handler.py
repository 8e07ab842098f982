"""Handles calls on a worker: the work behind their Celery tasks, without Celery.

The handler verifies a call, decodes its arguments, runs its target, and encodes and times the result.
Only the target depends on the kind of call: a method, a command line, or a hook of a pinned plugin. A
plugin's exception leaves the worker with hints and places, and without secrets.

A target without effects runs and returns; nothing is recorded unless its caller may have stopped
waiting. The others are claimed by their call id first, so that a repeated delivery never repeats an effect,
and their history, follow-up round and outcome are one transaction."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.app.calls.detached import detached_request, end_job, settle
from nekro.app.chats.publisher import EventPublisher
from nekro.base.redaction import Redactor
from nekro.broker.failures import name_of
from nekro.broker.fairness import ChatPace
from nekro.plugins.invoke import Outcome
from nekro.wire.author_frames import AuthorFrame, attach, author_frames, source_folder
from nekro.wire.decode_pool import DecodePool
from nekro.wire.invocation import Envelope, Invocation, Signer, is_long_body, tool_answer
from nekro.wire.values import Arguments, encode_value
from nekro_agent.durations import GRACE_SECONDS, RETRY_SECONDS
from nekro_agent.errors import CallTimeoutError, MethodFailedError, NekroError, ResultError, StorageError
from nekro_agent.execution.current import effects_of, on_account
from nekro_agent.placeholders import OWN_PACKAGES
from nekro_agent.ports import JobState
from nekro_agent.shared_clock import shared_time
from storage.engine import Database
from storage.states import CallState
from workers.calls.claims import CallClaims, CallSubject, DuplicateDelivery

__all__ = [
    "CallEnds",
    "CallHandler",
    "CallTarget",
    "FindTarget",
    "MisplacedCall",
    "OnStep",
    "explained",
    "places_in_plugin",
    "redacted",
]


_PLAIN_TYPES = (int, float, str, bytes, bool, list, dict, tuple, set)


def redacted(exc: Exception, redactor: Redactor) -> Exception:
    """Return ``exc``, or a substitute with redacted text when its chain holds something sensitive.

    Celery stores the traceback of the whole chain, so a secret in the text of a cause counts too.
    Raise a substitute ``from None``.
    """
    if all(redactor(str(link)) == str(link) for link in _chain(exc)):
        return exc
    return MethodFailedError(type(exc).__name__, redactor(str(exc)))


def places_in_plugin(
    exc: Exception, function: Callable[..., Any], redactor: Redactor
) -> tuple[AuthorFrame, ...]:
    """Return the frames of the plugin's own source that an exception of a method passed, innermost last."""
    folder = source_folder(inspect.unwrap(function).__module__)
    return () if folder is None else author_frames(exc, folder, own=OWN_PACKAGES, hide=redactor)


def _chain(exc: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    waiting: list[BaseException | None] = [exc]
    while waiting:
        link = waiting.pop()
        if link is not None and link not in links:
            links.append(link)
            waiting += [link.__cause__, link.__context__]
    return links


def explained(
    exc: Exception, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Exception:
    """Name in an exception the arguments whose types differ from the signature.

    Types are not enforced, because the reference enforces none and plugins rely on that. The hint
    is added only after the method has failed.
    """
    if isinstance(exc, NekroError) or not isinstance(exc, TypeError | AttributeError | ValueError):
        return exc
    wrong = _mismatches(function, args, kwargs)
    if not wrong:
        return exc
    return MethodFailedError(type(exc).__name__, f"{exc} ({'; '.join(wrong)})")


def _mismatches(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    try:
        bound = inspect.signature(function).bind(None, *args, **kwargs)
        hints = typing.get_type_hints(function)
    except (TypeError, NameError):
        return []
    wrong = []
    for name, value in list(bound.arguments.items())[1:]:
        expected = hints.get(name)
        if expected not in _PLAIN_TYPES or not isinstance(expected, type) or isinstance(value, expected):
            continue
        if expected is float and isinstance(value, int):
            continue
        wrong.append(f"argument {name} is {type(value).__name__}, the signature says {expected.__name__}")
    return wrong


#: Called with the seconds that a part of a call occupied the event loop; None for calls with short
#: arguments, which are not charged to their chat.
OnStep = Callable[[float], None] | None


class MisplacedCall(Exception):
    """The plugin of the call is pinned to another process."""

    def __init__(self, queue: str, body: object) -> None:
        super().__init__(f"belongs to queue {queue}")
        self.queue = queue
        #: The body of the call's message.
        self.body = body


class CallTarget(Protocol):
    """What one call runs."""

    #: Identifies it in records.
    subject: CallSubject
    #: Whether it runs at most once per call id.
    is_claimed: bool

    def home(self, arguments: Arguments) -> str | None:
        """Return the queue of the process that must run it; None if this process may.

        Raises:
            MethodNotFoundError: this worker does not have it.
        """
        return None

    def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Awaitable[Outcome]:
        """Run it; the plugin's own exceptions propagate."""
        ...

    def explained(self, error: Exception, arguments: Arguments) -> Exception:
        """Return an error of ``run``, or one in its place that says more to the caller."""
        return error

    def places(self, error: Exception, redactor: Redactor) -> tuple[AuthorFrame, ...]:
        """Return where in the plugin's source an error of ``run`` was raised; () if that is unknown."""
        return ()


#: Returns the target that a verified call names, or raises ``MethodNotFoundError`` or
#: ``MethodDisabledError``.
FindTarget = Callable[[Invocation], CallTarget]


class CallEnds:
    """Records calls that end without a claim: TOOL calls, and failures before the claim."""

    def __init__(self, database: Database, publisher: EventPublisher) -> None:
        self._database = database
        self._publisher = publisher

    async def record(
        self,
        subject: CallSubject,
        invocation: Invocation,
        *,
        value: Any = None,
        answer: dict[str, Any] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Record the end of a call whose caller may have stopped waiting, and inform the chat if it has.

        The ends of most calls are not recorded, because their callers wait.

        Args:
            answer: what was sent to the caller; a program that waits for the job gets it.
        """
        if invocation.waits_until is None or invocation.waited_seconds_left() > GRACE_SECONDS:
            return
        try:
            await self._record(subject, invocation, value, answer, error)
        except StorageError as exc:  # the sweep reports to the chat that the outcome is unknown
            logger.bind(call_id=invocation.call_id, error=str(exc)).warning("call_end_not_recorded")

    async def _record(
        self,
        subject: CallSubject,
        invocation: Invocation,
        value: Any,
        answer: dict[str, Any] | None,
        error: BaseException | None,
    ) -> None:
        async with self._database.begin() as transaction:
            call = await transaction.detached_calls.end(
                detached_request(subject.type, invocation, lane=subject.lane.value),
                state=CallState.DONE if error is None else CallState.FAILED,
                outcome=answer,
                error_type=None if error is None else name_of(error),
                error_message=None if error is None else str(error) or repr(error),
            )
            if call is not None:
                await settle(transaction, self._publisher, call, value=value)
                return
            call = await transaction.calls.find(invocation.call_id)
            if call is None or call.finished_at is not None:  # else another worker runs it
                await end_job(transaction, self._publisher, invocation.call_id, JobState.FAILED, "ended")


class CallHandler:
    """Handles the calls of one worker process."""

    def __init__(
        self,
        *,
        signer: Signer,
        claims: CallClaims,
        ends: CallEnds,
        redactor: Redactor,
        sandbox_settings: SandboxSettings,
        worker_name: str,
    ) -> None:
        self._signer = signer
        self._claims = claims
        self._ends = ends
        self._redactor = redactor
        self._argument_bytes = sandbox_settings.argument_bytes
        self._return_bytes = sandbox_settings.return_bytes
        self._worker_name = worker_name
        self._decode_pool = DecodePool()
        self._pace = ChatPace(only_beside_others=True)

    async def handle(self, body: object, *, task_name: str, find: FindTarget) -> dict[str, Any]:
        """Run the call of a message body; returns the envelope as JSON data.

        Args:
            task_name: the Celery task that carried the body; the call must be signed for it.

        Raises:
            MessageRefusedError: the body is unsigned, altered, malformed, or signed for another task.
            CallTimeoutError: its deadline has passed, and it has no recorded outcome; it was not started.
            MethodNotFoundError, MethodDisabledError, ArgumentError, ResultError,
                OutcomeUnknownError: as their names say.
            DuplicateDelivery: another delivery of the call is running; nothing was done.
            MisplacedCall: the plugin is pinned to another process; nothing was done.
            Exception: what the target itself raised, redacted if its text holds a secret.
        """
        invocation = await self._verified(body, task_name)
        target = find(invocation)
        # The settings of its caller may require approval where those of this worker do not.
        is_claimed = target.is_claimed or invocation.is_recorded
        if invocation.remaining_seconds() <= 0:
            # An earlier delivery may have recorded an outcome that its caller did not get.
            envelope = await self._claims.recorded(invocation.call_id) if is_claimed else None
            if envelope is not None:
                return envelope.model_dump(mode="json")
            raise CallTimeoutError(
                f"{invocation.method}: the deadline of call {invocation.call_id} passed in the queue"
            )
        try:
            # Arguments first: a call that cannot start must not be claimed.
            arguments = await self._arguments(invocation)
            home = target.home(arguments)
            if home is not None:
                raise MisplacedCall(home, body)
            del body  # frees memory: thousands of calls may wait at a time
            if is_claimed:
                return await self._run_once(target, invocation, arguments)
            return await self._run(target, invocation, arguments)
        except (DuplicateDelivery, MisplacedCall):
            raise
        except Exception as exc:
            await self._ends.record(target.subject, invocation, error=exc)
            raise
        except asyncio.CancelledError as exc:
            if (limit := _time_limit_of(invocation, exc)) is not None:
                await self._ends.record(target.subject, invocation, error=limit)
            raise

    async def _verified(self, body: object, task_name: str) -> Invocation:
        if is_long_body(body):
            # Hashing takes a millisecond and releases the GIL.
            return await asyncio.to_thread(self._signer.verify, body, task_name=task_name)
        return self._signer.verify(body, task_name=task_name)

    async def _arguments(self, invocation: Invocation) -> Arguments:
        chat_key = invocation.chat_key
        self._pace.called(chat_key)
        if self._decode_pool.is_large(invocation.args):
            await self._pace.turn(chat_key)
        return await self._decode_pool.read(
            invocation.args,
            chat_key=chat_key,
            max_bytes=self._argument_bytes,
            spent=functools.partial(self._pace.spent, chat_key),
        )

    async def _run(self, target: CallTarget, invocation: Invocation, arguments: Arguments) -> dict[str, Any]:
        started_at = shared_time()
        outcome = await self._outcome(target, invocation, arguments)
        answer = tool_answer(
            call_id=invocation.call_id,
            value=self._encoded(invocation, outcome.value),
            worker=self._worker_name,
            started_at=started_at,
            finished_at=shared_time(),
        )
        await self._ends.record(target.subject, invocation, value=outcome.value, answer=answer)
        return answer

    async def _run_once(
        self, target: CallTarget, invocation: Invocation, arguments: Arguments
    ) -> dict[str, Any]:
        claim = await self._claims.claim(target.subject, invocation, worker=self._worker_name)
        if claim.envelope is not None:
            return claim.envelope.model_dump(mode="json")
        started_at = shared_time()
        try:
            outcome = await self._outcome(target, invocation, arguments)
            envelope = self._envelope(invocation, outcome, started_at)
        except BaseException as exc:
            await self._claims.fail(claim, _time_limit_of(invocation, exc) or exc)
            raise
        ended = await self._claims.finish(claim, invocation, envelope, value=outcome.value)
        return ended.model_dump(mode="json")

    async def _outcome(self, target: CallTarget, invocation: Invocation, arguments: Arguments) -> Outcome:
        try:
            account_id = invocation.turn_id or invocation.account_id
            with effects_of(invocation.call_id), on_account(account_id):
                return await target.run(invocation, arguments, self._on_step(invocation))
        except Exception as exc:
            shown = redacted(target.explained(exc, arguments), self._redactor)
            attach(shown, target.places(exc, self._redactor))
            if shown is exc:
                raise
            # Without a cause: Celery stores the traceback of the whole chain, including secrets.
            raise shown.with_traceback(exc.__traceback__) from None

    def _on_step(self, invocation: Invocation) -> OnStep:
        if not self._decode_pool.is_large(invocation.args):
            return None
        return functools.partial(self._pace.spent, invocation.chat_key)

    def _envelope(self, invocation: Invocation, outcome: Outcome, started_at: datetime) -> Envelope:
        return Envelope.of(
            call_id=invocation.call_id,
            type=outcome.type,
            value=None if outcome.type.wakes_agent else self._encoded(invocation, outcome.value),
            text=outcome.text,
            segments=outcome.segments,
            worker=self._worker_name,
            started_at=started_at,
            finished_at=shared_time(),
        )

    def _encoded(self, invocation: Invocation, value: Any) -> bytes:
        began = time.monotonic()
        try:
            return encode_value(value, max_bytes=self._return_bytes)
        except ResultError as exc:
            # Its message may quote what the value's own code raised.
            raise redacted(exc, self._redactor) from None
        finally:
            if (on_step := self._on_step(invocation)) is not None:
                on_step(time.monotonic() - began)


def _time_limit_of(invocation: Invocation, error: BaseException) -> CallTimeoutError | None:
    """Return the error of a call that its pool stopped at its deadline; None for any other end."""
    # Two hosts' clocks differ a little: it may seem to have some time left, but not enough to be tried again.
    if not isinstance(error, asyncio.CancelledError) or invocation.remaining_seconds() > RETRY_SECONDS:
        return None
    return CallTimeoutError(f"{invocation.method}: call {invocation.call_id} was stopped at its time limit")
