"""A caller in a process of its own: ``python fault_caller.py LOG NUMBER OPTIONS_JSON``.

Settings come from the environment. It writes ``ready`` to its log, reads from standard input when to stop
(seconds since the epoch), and then logs each call and each answer as one line.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fault_plan import LIMIT_SECONDS, CallKind, CallPlan, FaultKind, Options, call_plans, runs_in

from broker_config.settings import Settings
from nekro.app import use_cases
from nekro.app.calls.dispatch import CallScope
from nekro.app.services import Services
from nekro.wire.values import decode_value, encode_arguments
from nekro_agent.errors import BrokerUnavailableError, StorageUnavailableError

ERRORS = "nekro_agent.errors"
#: Seconds after its deadline for which the caller waits for an answer.
HANG_SECONDS = 20.0
#: Pause between two calls of one task, in seconds, in runs that are limited by time.
PAUSE_SECONDS = 0.05
#: Attempts to start; the pauses between them take 22 s in all, longer than any outage.
STARTS = 30


class Caller:
    """Makes the calls of a plan, several at a time."""

    def __init__(self, services: Services, options: Options, number: int, log: Path) -> None:
        self._services, self._options, self._number = services, options, number
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._scopes: dict[str, CallScope] = {}
        self._plans: Iterator[CallPlan] = call_plans(options, number)
        if options.calls:
            self._plans = itertools.islice(self._plans, options.calls // options.callers)

    def write(self, event: str, **fields: Any) -> None:
        """Append a line to the log; a SIGKILL loses no earlier line."""
        os.write(self._log, f"{json.dumps({'event': event, 'at': time.time(), **fields})}\n".encode())

    async def run(self, until: float) -> None:
        """Call until then, or until the plan is done; open calls are waited for."""
        await asyncio.gather(*(self._line(until) for _ in range(self._options.at_once)))

    async def call_once(self) -> None:
        """Make one call without work, and wait for its answer."""
        kind = next(kind for kind in CallKind if kind is not CallKind.PERSON and runs_in(kind, self._options))
        await self._one(
            CallPlan(
                call_id=f"{kind[0].upper()}{self._number}-first", kind=kind, chat_key="calls/0",
                work_seconds=0, limit_seconds=LIMIT_SECONDS, cancel_after_seconds=None,
            )
        )  # fmt: skip

    async def _line(self, until: float) -> None:
        for plan in self._plans:
            if not self._options.calls and time.time() >= until:
                return
            await self._one(plan)
            await asyncio.sleep(0 if self._options.calls else PAUSE_SECONDS)

    async def _one(self, plan: CallPlan) -> None:
        deadline = datetime.now(UTC) + timedelta(seconds=plan.limit_seconds)
        self.write("sent", deadline=deadline.timestamp(), **asdict(plan))
        task = asyncio.create_task(self._perform(plan, deadline))
        if plan.cancel_after_seconds is not None:
            await asyncio.wait({task}, timeout=plan.cancel_after_seconds)
            task.cancel()
        await asyncio.wait({task}, timeout=plan.limit_seconds + HANG_SECONDS)
        if not task.done():
            self.write("answered", call_id=plan.call_id, outcome="none", detail="")
            task.cancel()
            return
        outcome, detail = "ok", ""
        try:
            value = await task
            outcome, detail = ("detached", "") if value is None else ("ok", str(value))
        except asyncio.CancelledError:
            outcome = "cancelled"
        except Exception as exc:
            outcome, detail = _public_name(exc), str(exc)
        self.write("answered", call_id=plan.call_id, outcome=outcome, detail=detail[:300])

    async def _perform(self, plan: CallPlan, deadline: datetime) -> object:
        """Return what the call returns; None: it was detached."""
        if plan.kind is CallKind.PERSON:
            return await use_cases.receive_message(
                self._services, plan.chat_key, f"please do R{plan.call_id}", user_id="u", user_name="U"
            )
        if plan.kind is CallKind.APPROVED:
            envelope = await use_cases.invoke(
                self._services,
                plan.kind.value,
                (plan.call_id, plan.work_seconds),
                {},
                chat_key=plan.chat_key,
                user_id=None,
                timeout_seconds=(deadline - datetime.now(UTC)).total_seconds(),
                call_id=plan.call_id,
                approver="shell:tests",
            )
            return decode_value(envelope.value_bytes(), max_bytes=1 << 20)
        entry = await self._services.find_method(plan.kind.value)
        arguments = encode_arguments((plan.call_id, plan.work_seconds), {})
        scope = await self._scope(plan.chat_key)
        dispatcher = self._services.dispatcher
        if plan.detaches:
            lane = dispatcher.lane_of(entry)
            answer = await dispatcher.invoke_or_detach(
                entry, arguments, scope, call_id=plan.call_id, lane=lane
            )
        else:
            invocation = scope.call(entry, arguments, call_id=plan.call_id, deadline=deadline)
            answer = await self._services.caller.call(invocation, lane=dispatcher.lane_of(entry))
        if answer is None:
            return None
        return decode_value(answer.value_bytes(), max_bytes=1 << 20) if answer.value else answer.text

    async def _scope(self, chat_key: str) -> CallScope:
        if chat_key not in self._scopes:
            chat = await self._services.chat(chat_key)
            # A detached call requests a round, which only a rounds worker ends.
            wakes_agent = "rounds" in self._options.lanes
            self._scopes[chat_key] = CallScope(chat=chat, user_id=None, wakes_agent=wakes_agent)
        return self._scopes[chat_key]


def _public_name(error: Exception) -> str:
    """Name of the public class that a caller would catch."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ in (ERRORS, "builtins"))


async def started(settings: Settings) -> Services:
    """Start as a program would whose supervisor starts it again: a fault may be under way."""
    for attempt in itertools.count(1):
        services = Services.load(settings, role="cli")
        try:
            await services.start()
            break
        except (BrokerUnavailableError, StorageUnavailableError):
            await services.close()
            if attempt == STARTS:
                raise
            await asyncio.sleep(PAUSE_SECONDS * attempt)
    return services


async def main() -> None:
    """Start, make the first call if requested, write ``ready``, call, close."""
    log, number, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    calls_first = sys.argv[4] == "calls-first"
    options["faults"] = tuple(map(FaultKind, options["faults"]))
    options["lanes"], options["methods"] = tuple(options["lanes"]), tuple(options["methods"])
    services = await started(Settings.load(env_file=None))
    try:
        caller = Caller(services, Options(**options), number, log)
        if calls_first:
            await caller.call_once()
        caller.write("ready")
        await caller.run(float(await asyncio.to_thread(sys.stdin.readline)))
    finally:
        await services.close()


if __name__ == "__main__":
    asyncio.run(main())
