"""Execute one run in one sandbox: wall time, guards, stop type, result, and the end of the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from broker_config.settings import SandboxSettings
from nekro.sandbox.bridge import Bridge, BridgeOutcome
from nekro.sandbox.driver import ExitStatus, Sandbox
from nekro.sandbox.limits.enforcement import bridge_limits, process_limits
from nekro.sandbox.limits.guards import GUARD_SECONDS, Guards, watch
from nekro.sandbox.limits.processes import threads_of_user
from nekro.sandbox.limits.quota import Quota
from nekro.sandbox.models import (
    GONE_SECONDS,
    STOPPED_BY_CALL,
    Dispatch,
    KeptVariables,
    Limit,
    RunRequest,
    RunResult,
    StopType,
    StubMethod,
)
from nekro.sandbox.shared import ProgramLinks, mentions_areas
from nekro.sandbox.streams import OutputCollector, clean_text
from nekro.sandbox.undo import MOST_UNDO_BYTES, undo_name
from nekro.sandbox.variables import MOST_VARIABLES, read_kept, reserved_names

__all__ = ["SandboxRun", "judge"]

#: How long code may clean up after the STOP frame: twice what the guest allows itself.
_STOP_SECONDS: Final = 0.2
#: As long, for code whose variables are kept.
_KEEP_SECONDS: Final = 2.0
#: How long a sandbox may take to end after it has closed the socket.
_EXIT_SECONDS: Final = 2
_KILLED: Final = ExitStatus(code=128 + 9)
_MANUAL_EXIT_CODE: Final = 9
#: As long as what the runner sends: the line is part of prompts.
_ERROR_CHARS: Final = 4000
#: A run that writes this many times what is kept is a flood.
_KILL_FACTOR: Final = 16
#: Exit codes of the signals that the kernel sends to enforce a resource limit.
_LIMIT_SIGNALS: Final = {128 + 24: Limit.CPU, 128 + 25: Limit.FILE_SIZE}
_HINTS: Final = {limit.value: limit for limit in Limit if limit is not Limit.WALL}


class SandboxRun:
    """Executes one request in one sandbox, and ends the sandbox."""

    def __init__(
        self,
        sandbox: Sandbox,
        request: RunRequest,
        *,
        settings: SandboxSettings,
        driver: str,
    ) -> None:
        self._sandbox = sandbox
        self._request = request
        self._settings = settings
        self._driver = driver
        #: The first limit that was exceeded, and a text about it for the result.
        self._broken: tuple[Limit, str | None] | None = None
        self._guards = Guards(alive=lambda: sandbox.alive, end=self.end, bound_seconds=GUARD_SECONDS)
        self._stopped_by_operator = False
        self._quota: Quota | None = None
        #: Clean-up that is left when ``execute`` returned before the sandbox's end; None when none is.
        self.rest: contextlib.AsyncExitStack | None = None
        self.output = OutputCollector(
            keep_bytes=settings.output_keep_bytes,
            kill_bytes=_KILL_FACTOR * settings.output_keep_bytes,
            on_output=request.on_output,
        )

    def end(self, limit: Limit, error: str | None = None) -> None:
        """Kill the sandbox because a limit was exceeded, from any thread; the first one counts."""
        self._broken = self._broken or (limit, error)
        self._sandbox.kill()

    def stop(self) -> None:
        """Kill the sandbox at an operator's request."""
        self._stopped_by_operator = True
        self._sandbox.kill()

    async def execute(
        self,
        *,
        methods: dict[str, StubMethod],
        dispatch: Dispatch,
        host_methods: Mapping[str, Dispatch] = {},
    ) -> RunResult:
        """Run the code and return how it ended.

        The sandbox is closed then, unless ``rest`` is set: where a method's result ended the run, the
        caller does not wait for the end of processes that can no longer call or print.

        Args:
            host_methods: as in ``Bridge``.
        """
        started_at, begin = datetime.now(UTC), time.monotonic()
        limits = bridge_limits(self._settings, keep_bytes=self._request.keep_bytes)
        bridge = Bridge(
            self._sandbox.reader,
            self._sandbox.writer,
            methods=methods,
            dispatch=dispatch,
            limits=limits,
            unread=self._guards.add("unread", allowed_seconds=limits.unread_seconds),
            host_methods=host_methods,
            is_forbidden=self._request.is_forbidden,
            call_id=self._request.call_id,
            readings_bytes=len(self._request.readings),
        )
        async with contextlib.AsyncExitStack() as clean_up:
            clean_up.callback(self._guards.close)
            # Runs in reverse: kill, wait for the calls' clean-up, close the sandbox, enforce the quota.
            clean_up.push_async_callback(self._cut_back, since=started_at)
            clean_up.push_async_callback(self._sandbox.close)
            clean_up.push_async_callback(bridge.close)
            clean_up.callback(self._sandbox.kill)
            links = clean_up.enter_context(contextlib.ExitStack())
            shared_dir = self._sandbox.spec.shared_dir
            if mentions_areas((self._request.code, *self._request.variables.values())):
                links.callback((await asyncio.to_thread(ProgramLinks, shared_dir)).end)
            if not self._sandbox.spec.shared_bounded:
                self._quota = await asyncio.to_thread(Quota.at_start, shared_dir, self._settings)
            clean_up.callback(self._guards.stop)
            pump = self._pump()
            self._guards.task("end", self._notify_of_end(bridge))
            watch(self._guards, self._sandbox, self._quota, self._settings)
            outcome = await self._converse(bridge)
            status = None
            if await self._falls_silent(outcome, bridge):
                pump.cancel()
                self.rest = clean_up.pop_all()
            else:
                status = await self._exit_or_kill(outcome)
                await asyncio.wait([pump], timeout=_EXIT_SECONDS)
            links.close()
        broken, words = self._broken or (None, None)
        stop_type, limit, error = judge(
            outcome, status, limit=broken, words=words, stopped_by_operator=self._stopped_by_operator
        )
        kept = await self._kept(bridge, stop_type, limit)
        return RunResult(
            run_id=self._request.run_id,
            stop_type=stop_type,
            exit_code=None if status is None else status.code,
            output=self.output.text(),
            truncated=self.output.truncated,
            limit=limit,
            calls=bridge.calls,
            error=None if error is None else _clean(error),
            started_at=started_at,
            duration_seconds=time.monotonic() - begin,
            driver=self._driver,
            kept=kept,
            readings="" if outcome.exit is None else outcome.exit.readings,
        )

    async def _kept(self, bridge: Bridge, stop_type: StopType, limit: Limit | None) -> KeptVariables | None:
        """Return the variables of a run that came to its end; those of one that was killed are dropped."""
        if bridge.kept is None or limit is not None or stop_type is StopType.SECURITY:
            return None
        request = self._request
        return await read_kept(
            bridge.kept, reserved=reserved_names(request.methods), most_bytes=request.keep_bytes
        )

    def _pump(self) -> asyncio.Task[Any]:
        pumping = self.output.pump(
            self._sandbox.output,
            guard=self._guards.add("output"),
            on_over_limit=lambda: self.end(Limit.OUTPUT),
        )
        return self._guards.task("output", pumping)

    async def _notify_of_end(self, bridge: Bridge) -> None:
        await self._sandbox.wait()
        bridge.sandbox_ended()

    async def _converse(self, bridge: Bridge) -> BridgeOutcome:
        wall_seconds = self._request.wall_seconds or self._settings.wall_seconds
        # In case the event loop is too busy for its own timer.
        self._guards.add("wall", allowed_seconds=wall_seconds).begin()
        # Of an ordinary user without namespaces, the kernel counts everything that it runs.
        others = await asyncio.to_thread(threads_of_user, os.geteuid()) if self._sandbox.shares_user else 0
        try:
            async with asyncio.timeout(wall_seconds):
                return await bridge.run(self._payload(others))
        except TimeoutError:
            return BridgeOutcome(limit=Limit.WALL)

    def _payload(self, others: int) -> bytes:
        stubs = [
            {
                "token": method.token,
                "name": method.name,
                "path": method.path,
                "signature": method.signature,
                "doc": method.doc,
            }
            for method in self._request.methods
        ]
        run = {
            "code": self._request.code,
            "chat_key": self._request.chat_key,
            "stubs": stubs,
            "limits": process_limits(self._settings, others=others),
            "argument_bytes": self._settings.argument_bytes,
            "figures": self._settings.figures,
            "keep": {"bytes": self._request.keep_bytes, "most": MOST_VARIABLES},
            "variables": dict(self._request.variables),
            "replay": {
                "seed": self._request.seed,
                "readings": self._request.readings,
                "undo": self._undo(),
            },
        }
        return json.dumps(run).encode()

    def _undo(self) -> dict[str, Any] | None:
        """Return how the guest saves what files contain before it changes them; None: it does not."""
        if self._request.program_id is None:
            return None
        if self._quota is None:
            room = os.statvfs(self._sandbox.spec.shared_dir)
            free = room.f_bavail * room.f_frsize
        else:
            free = self._quota.most_bytes - self._quota.used_bytes
        # Half of what is free, so that a program does not meet the limit because of its own copies.
        return {"name": undo_name(self._request.program_id), "most_bytes": min(free // 2, MOST_UNDO_BYTES)}

    async def _falls_silent(self, outcome: BridgeOutcome, bridge: Bridge) -> bool:
        """Give code that a method's result stopped time to clean up; returns whether it closed the socket.

        Code may close it early: it can make no more calls, and only its own later output is lost.
        """
        if outcome.stop not in STOPPED_BY_CALL:
            return False
        try:
            async with asyncio.timeout(_KEEP_SECONDS if self._request.keep_bytes else _STOP_SECONDS):
                await bridge.silence()
                await self._sandbox.drain()
        except TimeoutError:
            return False
        return True

    async def _exit_or_kill(self, outcome: BridgeOutcome) -> ExitStatus:
        """Wait for the exit of code that ended by itself, else kill the sandbox; returns the exit status."""
        if outcome.limit is None and outcome.stop is None:
            with contextlib.suppress(TimeoutError):
                return await self._exit_status(_EXIT_SECONDS)
        self._sandbox.kill()
        try:
            return await self._exit_status(GONE_SECONDS)
        except TimeoutError as exc:
            self._guards.fail("end", exc)
            return _KILLED

    async def _exit_status(self, seconds: float) -> ExitStatus:
        """Wait for the sandbox's end.

        Raises:
            TimeoutError: it did not end in time.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._sandbox.wait()
        except TimeoutError:
            raise
        except Exception as exc:  # reported in the result; the sandbox is killed either way
            self._guards.fail("end", exc)
            return _KILLED

    async def _cut_back(self, *, since: datetime) -> None:
        """Delete what the run wrote in excess of its quota."""
        quota = self._quota
        if quota is not None and await asyncio.to_thread(quota.exceeded):
            await asyncio.to_thread(quota.cut_back, since=since.timestamp())
            self._broken = self._broken or (Limit.DISK, None)


def _clean(error: str) -> str:
    """Clean text that may come from the sandbox; JSON may contain lone surrogates, which are replaced."""
    return clean_text(error[:_ERROR_CHARS].encode("utf-8", "replace").decode())


def judge(
    outcome: BridgeOutcome,
    status: ExitStatus | None,
    *,
    limit: Limit | None,
    stopped_by_operator: bool,
    words: str | None = None,
) -> tuple[StopType, Limit | None, str | None]:
    """Decide the stop type, the limit and the error line from the host's observations.

    Args:
        status: None where a method's result ended the run and the exit was not awaited.
        limit: the host killed the sandbox because this limit was exceeded.
        words: the host's text about that limit.
    """
    report = outcome.exit
    error = words or outcome.error or (report.error if report else None)
    if outcome.stop is not None or status is None:
        return outcome.stop or StopType.ERROR, None, error
    if stopped_by_operator:
        return StopType.MANUAL, None, error
    limit = limit or outcome.limit
    if limit is not None:
        return (StopType.TIMEOUT if limit is Limit.WALL else StopType.ERROR), limit, error
    if report is not None and report.code == status.code and report.error is None:
        if status.code == 0:
            return StopType.NORMAL, None, None
        if status.code == _MANUAL_EXIT_CODE:
            return StopType.MANUAL, None, None
    if report is not None and report.limit is not None:
        # The sandbox's own report is used only here: it names the reason of a run that is an error
        # in any case.
        return StopType.ERROR, _HINTS.get(report.limit), error
    limit = _LIMIT_SIGNALS.get(status.code) or status.limit
    return StopType.ERROR, limit, error or _how_it_ended(status)


def _how_it_ended(status: ExitStatus) -> str:
    if status.code > 128:
        return f"the process was killed by signal {status.code - 128}"
    return f"the process ended with exit code {status.code}"
