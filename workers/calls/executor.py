"""Runs one call of one method on a worker: the work behind a Celery task, without Celery.

A TOOL call runs and returns; nothing is recorded unless its caller may have stopped waiting. Calls of
the other types are claimed by their call id first, so that a repeated delivery never repeats an effect,
and their history, follow-up round and outcome are one transaction.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from broker_config.settings import SandboxSettings
from codec.decode_pool import DecodePool
from codec.values import Arguments, encode_value
from codec.wire import Envelope, Invocation, Signer, is_long_body, tool_answer
from messaging.pace import ChatPace
from nekro_agent.errors import CallTimeoutError, ResultError
from nekro_agent.execution.invoke import Outcome, call_method
from nekro_agent.methods import SandboxMethodType
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.shared_clock import shared_time
from runtime.redaction import Redactor
from workers.calls.claims import CallClaims, DuplicateDelivery
from workers.calls.detached import CallEnds
from workers.calls.failures import explained, redacted
from workers.calls.progress import CallReports
from workers.plugins.loop_watchdog import LoopWatchdog
from workers.plugins.registry import MethodEntry, Registry

__all__ = ["MethodExecutor", "MisplacedCall"]


class MisplacedCall(Exception):
    """The plugin of the call is pinned to another process."""

    def __init__(self, queue: str, body: object) -> None:
        super().__init__(f"belongs to queue {queue}")
        self.queue = queue
        #: The body of the call's message.
        self.body = body


class MethodExecutor:
    """Executes signed invocations; one instance per worker process."""

    def __init__(
        self,
        *,
        registry: Registry,
        signer: Signer,
        claims: CallClaims,
        ends: CallEnds,
        redactor: Redactor,
        sandbox_settings: SandboxSettings,
        worker_name: str,
        reports: CallReports,
        home_of: Callable[[MethodEntry], str | None],
        watchdog: LoopWatchdog | None = None,
    ) -> None:
        """Create the executor.

        Args:
            home_of: the queue of the process that must run the call; None when this process may.
        """
        self._registry = registry
        self._signer = signer
        self._claims = claims
        self._ends = ends
        self._redactor = redactor
        self._argument_bytes = sandbox_settings.argument_bytes
        self._return_bytes = sandbox_settings.return_bytes
        self._worker_name = worker_name
        self._reports = reports
        self._home_of = home_of
        self._watchdog = watchdog
        self._decode_pool = DecodePool()
        self._pace = ChatPace(only_beside_others=True)

    async def execute(self, body: object, *, task_name: str) -> dict[str, Any]:
        """Run the method that a message body names; returns the envelope as JSON data.

        Args:
            task_name: the Celery task that carried the body; it must be the signed method.

        Raises:
            MessageRefusedError: the body is unsigned, altered, malformed, or signed for another task.
            CallTimeoutError: its deadline has passed; the method was not started.
            MethodNotFoundError, MethodDisabledError, ArgumentError, ResultError,
                OutcomeUnknownError: as their names say.
            MisplacedCall: the plugin is pinned to another process; nothing was done.
            Exception: what the method itself raised, redacted if its text holds a secret.
        """
        invocation = await self._verified(body, task_name)
        if invocation.remaining_seconds() <= 0:
            raise CallTimeoutError(
                f"{invocation.method}: the deadline of call {invocation.call_id} passed in the queue"
            )
        entry = self._registry.find(invocation.method)
        home = self._home_of(entry)
        if home is not None:
            raise MisplacedCall(home, body)
        del body  # frees memory: thousands of calls may wait at a time
        try:
            if entry.type is SandboxMethodType.TOOL:
                return await self._run(entry, invocation)
            return (await self._run_once(entry, invocation)).model_dump(mode="json")
        except DuplicateDelivery:
            raise
        except Exception as exc:
            await self._ends.record(entry, invocation, error=exc)
            raise

    async def _verified(self, body: object, task_name: str) -> Invocation:
        if is_long_body(body):
            # Hashing takes a millisecond and releases the GIL.
            return await asyncio.to_thread(self._signer.verify, body, task_name=task_name)
        return self._signer.verify(body, task_name=task_name)

    async def _run(self, entry: MethodEntry, invocation: Invocation) -> dict[str, Any]:
        started_at = shared_time()
        outcome = await self._call(entry, invocation, await self._arguments(invocation))
        answer = tool_answer(
            call_id=invocation.call_id,
            value=self._encoded(invocation, outcome.value),
            worker=self._worker_name,
            started_at=started_at,
            finished_at=shared_time(),
        )
        await self._ends.record(entry, invocation, value=outcome.value)
        return answer

    async def _run_once(self, entry: MethodEntry, invocation: Invocation) -> Envelope:
        # Arguments first: a call that cannot start must not be claimed.
        arguments = await self._arguments(invocation)
        claim = await self._claims.claim(entry, invocation, worker=self._worker_name)
        if claim.envelope is not None:
            return claim.envelope
        started_at = shared_time()
        try:
            outcome = await self._call(entry, invocation, arguments)
            envelope = self._envelope(invocation, outcome, started_at)
        except BaseException as exc:
            await self._claims.fail(claim, exc)
            raise
        return await self._claims.finish(claim, invocation, envelope)

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

    async def _call(self, entry: MethodEntry, invocation: Invocation, arguments: Arguments) -> Outcome:
        args, kwargs = arguments
        with self._reports.following(entry, invocation) as on_progress:
            ctx = _context(entry, invocation, on_progress)
            try:
                work = call_method(entry.method, ctx, args, kwargs)
                if self._watchdog is None:
                    return await work
                return await self._watchdog.follow(
                    entry,
                    work,
                    remaining_seconds=invocation.remaining_seconds(),
                    on_step=self._on_step(invocation),
                )
            except Exception as exc:
                shown = redacted(explained(exc, entry, args, kwargs), self._redactor)
                if shown is exc:
                    raise
                # Without a cause: Celery stores the traceback of the whole chain, including secrets.
                raise shown.with_traceback(exc.__traceback__) from None

    def _on_step(self, invocation: Invocation) -> Callable[[float], None] | None:
        if not self._decode_pool.is_large(invocation.args):
            return None
        return functools.partial(self._pace.spent, invocation.chat_key)

    def _envelope(self, invocation: Invocation, outcome: Outcome, started_at: datetime) -> Envelope:
        is_behavior = outcome.type is SandboxMethodType.BEHAVIOR
        return Envelope.of(
            call_id=invocation.call_id,
            type=outcome.type,
            value=self._encoded(invocation, outcome.value) if is_behavior else None,
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


def _context(
    entry: MethodEntry, invocation: Invocation, on_progress: Callable[[float, str], None]
) -> AgentCtx:
    return AgentCtx.for_call(
        chat_key=invocation.chat_key,
        container_key=invocation.container_key,
        user_id=invocation.user_id,
        adapter_key=invocation.adapter_key,
        channel_id=invocation.channel_id,
        channel_name=invocation.channel_name,
        channel_type=invocation.channel_type,
        plugin_key=entry.plugin.key,
        call_id=invocation.call_id,
        round_id=invocation.round_id,
        on_progress=on_progress,
    )
