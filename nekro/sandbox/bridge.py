"""The host's end of a sandbox's socket, one bridge per run: the sandbox's only way out.

The bridge reads one frame at a time, checks it against the state of the run, and passes
calls to ``dispatch``. It adds what the sandbox must not choose: the call id. At
``max_calls_in_flight`` it stops reading, so a sandbox that calls faster than plugins answer
blocks in its own ``write``; only one answer at a time is in the socket's buffer, so a sandbox
that does not read cannot make the host buffer more than the answers of the calls in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from loguru import logger

from nekro.base.deadlines import TimeLimits
from nekro.sandbox.limits.guards import Guard
from nekro.sandbox.models import (
    ARGUMENT_ERROR,
    HOST_TOKEN_PREFIX,
    MOST_READINGS_BYTES,
    READINGS_BYTES,
    Dispatch,
    Limit,
    Raised,
    Returned,
    Stopped,
    StopType,
    StubCall,
    StubMethod,
    StubResult,
    random_call_id,
)
from nekro.sandbox.streams import Frame, FrameKind, FrameReader, encode_frame
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import SandboxProtocolError

__all__ = ["Bridge", "BridgeLimits", "BridgeOutcome", "ExitReport"]

#: The name of a method, the line of the code that calls it, and what the code has read since its last call.
_TOKEN: Final = re.compile(
    rb"("
    + HOST_TOKEN_PREFIX.encode()
    + rb"[a-z_]{1,59}|(?!__)[A-Za-z_][A-Za-z0-9_]{0,63})(?:@([1-9][0-9]{0,6}))?(?:~([0-9a-z,.:+-]*|!))?"
)
_TOKEN_BYTES: Final = 64 + 8 + 1 + READINGS_BYTES
#: What EXIT says of readings.
_READINGS: Final = re.compile(r"(?:~(!|[0-9a-z,.:+-]*))?")
_EXIT_BYTES: Final = (64 << 10) + READINGS_BYTES
_ERROR_CHARS: Final = 8000
#: Ids that calls may leave out, because a call was interrupted before it was sent.
_MOST_SKIPPED_IDS: Final = 64


@dataclass(frozen=True, kw_only=True)
class BridgeLimits:
    """Limits of one run's bridge."""

    argument_bytes: int
    return_bytes: int
    #: How many calls are dispatched, and how many are refused before the run ends.
    max_calls: int
    max_calls_in_flight: int
    #: How long an answer may stay unread before the run ends.
    unread_seconds: float
    #: Largest frame of variables to keep; 0: such a frame is a violation.
    keep_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """The content of the EXIT frame; for display only, as the exit status decides."""

    code: int
    error: str | None
    limit: str | None
    #: What the program has read since its last call, as ``StubCall.readings``.
    readings: str = ""


@dataclass(frozen=True, kw_only=True)
class BridgeOutcome:
    """How the exchange of frames ended; at most one of ``stop`` and ``limit`` is set."""

    #: AGENT, MULTIMODAL_AGENT or APPROVAL when a call ended the run, SECURITY after a violation.
    stop: StopType | None = None
    limit: Limit | None = None
    exit: ExitReport | None = None
    error: str | None = None


class Bridge:
    """Serves the calls of one run."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        methods: Mapping[str, StubMethod],
        dispatch: Dispatch,
        limits: BridgeLimits,
        unread: Guard,
        host_methods: Mapping[str, Dispatch] = {},
        is_forbidden: Callable[[bytes], bool] | None = None,
        call_id: Callable[[str, bytes, str], str] = random_call_id,
        readings_bytes: int = 0,
    ) -> None:
        """
        Args:
            unread: guard that is pending while an answer waits to be read.
            call_id: as in ``RunRequest``.
            readings_bytes: length of the readings that the run repeats.
            host_methods: what answers the calls of the host's own methods, by token; ``dispatch`` answers
                all others.
            is_forbidden: as in ``RunRequest``.
        """
        allowed = {
            FrameKind.CALL: limits.argument_bytes + _TOKEN_BYTES + 1,
            FrameKind.EXIT: _EXIT_BYTES,
        }
        if limits.keep_bytes:
            allowed[FrameKind.KEEP] = limits.keep_bytes
        self._frames = FrameReader(reader, limits=allowed)
        self._writer = writer
        self._methods = methods
        self._dispatch = dispatch
        self._host_methods = host_methods
        self._is_forbidden = is_forbidden
        self._new_id = call_id
        self._limits = limits
        self._unread = unread
        self._waits = TimeLimits()
        self._slots = asyncio.Semaphore(limits.max_calls_in_flight)
        self._write_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._last_call_id = 0
        self._skipped_ids: set[int] = set()
        self._refusals = 0
        self._readings_bytes = readings_bytes
        self._sandbox_is_gone = False
        self._is_silent = False
        self._exit: ExitReport | None = None
        #: Variables to keep as the sandbox sent them: hostile; None when it sent none.
        self.kept: bytes | None = None
        #: Calls that the sandbox made, refused ones included.
        self.calls = 0
        # Without this, the transport buffers up to 64 KiB beyond the kernel before drain() waits.
        writer.transport.set_write_buffer_limits(high=0)

    async def run(self, payload: bytes) -> BridgeOutcome:
        """Send RUN and serve calls until the code ends, is stopped, or closes the socket.

        Calls that are in flight at the end, or when this coroutine is cancelled, are cancelled;
        ``close`` waits for their clean-up, so that the sandbox can be killed before it.
        """
        self._ended: asyncio.Future[BridgeOutcome] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._converse(payload), name="sandbox-bridge")
        try:
            return await self._ended
        finally:
            for task in self._tasks:
                task.cancel()

    def sandbox_ended(self) -> None:
        """Drop further calls: a bridge that waits for a free slot would not read the end of the socket."""
        self._sandbox_is_gone = True
        self._slots.release()

    async def silence(self) -> None:
        """Wait until the sandbox has closed its end of the socket; frames after the outcome are dropped."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def close(self) -> None:
        """Close the socket and wait a bounded time for cancelled calls; late answers are dropped."""
        if self._reading is not None:
            self._reading.cancel()
            self._tasks.add(self._reading)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_STEP_SECONDS)
        self._waits.close()
        self._writer.close()

    async def _converse(self, payload: bytes) -> None:
        try:
            await self._refuse_early_frames()
            await self._send(FrameKind.RUN, payload)
            while (frame := await self._frames.read()) is not None:
                await self._take(frame)
            self._fall_silent()
            self._end(BridgeOutcome(exit=self._exit))
        except ConnectionError:
            self._end(BridgeOutcome(exit=self._exit))
        except SandboxProtocolError as exc:
            self._end(BridgeOutcome(stop=StopType.SECURITY, error=str(exc)))
        except Exception as exc:  # the run must end after any error
            self._fail(exc)

    async def _refuse_early_frames(self) -> None:
        """Check that a waiting sandbox has sent nothing; a read that would block consumes nothing."""
        try:
            async with asyncio.timeout(0):
                frame = await self._frames.read()
        except TimeoutError:
            return
        if frame is not None:
            raise SandboxProtocolError(f"the sandbox sent a {frame.kind.name} frame before RUN")

    def _end(self, outcome: BridgeOutcome) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)

    def _fall_silent(self) -> None:
        """Close the write side: a process with unanswered calls waits for that before it ends."""
        self._is_silent = True
        with contextlib.suppress(OSError, RuntimeError):  # it is closed
            self._writer.write_eof()

    def _fail(self, exc: Exception) -> None:
        logger.opt(exception=exc).error("sandbox_bridge_failed")
        # The class alone: the message may name paths of the host.
        words = f"the run was ended because its bridge failed ({type(exc).__name__})"
        self._end(BridgeOutcome(limit=Limit.GUARD, error=words))

    async def _take(self, frame: Frame) -> None:
        # Also after a call that ended the run: the code's variables follow it.
        if frame.kind is FrameKind.KEEP and self._exit is None and self.kept is None:
            self.kept = frame.payload
            return
        if self._ended.done():
            return
        if frame.kind is FrameKind.KEEP:
            raise SandboxProtocolError("the sandbox sent its variables twice, or after EXIT")
        if self._exit is not None:
            raise SandboxProtocolError(f"the sandbox sent a {frame.kind.name} frame after EXIT")
        if frame.kind is FrameKind.EXIT:
            self._exit = _parse_exit(frame.payload, readings_of=self._readings_of)
            return
        call = self._call_of(frame)
        await self._slots.acquire()
        if self._sandbox_is_gone or self._ended.done():
            # The answer is not needed; a later EXIT frame still is.
            self._slots.release()
            return
        task = asyncio.create_task(self._serve(frame.call_id, call))
        self._tasks.add(task)
        task.add_done_callback(self._release)

    def _release(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()

    def _call_of(self, frame: Frame) -> StubCall:
        name, separator, arguments = frame.payload.partition(b"\0")
        match = _TOKEN.fullmatch(name)
        if not separator or match is None:
            raise SandboxProtocolError("the sandbox called a method by a malformed name")
        self._use_id(frame.call_id)
        self.calls += 1
        line, token = None if match[2] is None else int(match[2]), match[1].decode()
        readings = "" if match[3] is None else self._readings_of(match[3])
        return StubCall(
            token=token,
            call_id=self._new_id(token, arguments, readings),
            arguments=arguments,
            line=line,
            readings=readings,
        )

    def _readings_of(self, readings: bytes) -> str:
        self._readings_bytes += len(readings)
        if len(readings) > READINGS_BYTES or self._readings_bytes > MOST_READINGS_BYTES:
            raise SandboxProtocolError("the sandbox sent more readings than it may")
        return readings.decode("ascii")

    def _use_id(self, call_id: int) -> None:
        """Refuse an id that was used. The order differs when a call is made while another is being sent."""
        if call_id in self._skipped_ids:
            self._skipped_ids.remove(call_id)
            return
        if not 0 < call_id - self._last_call_id <= _MOST_SKIPPED_IDS:
            raise SandboxProtocolError(f"the sandbox used call id {call_id} again or out of order")
        self._skipped_ids.update(range(self._last_call_id + 1, call_id))
        if len(self._skipped_ids) > _MOST_SKIPPED_IDS:
            raise SandboxProtocolError(f"the sandbox skipped more than {_MOST_SKIPPED_IDS} call ids")
        self._last_call_id = call_id

    async def _serve(self, call_id: int, call: StubCall) -> None:
        """Check one call, let it be dispatched, and send its answer.

        Args:
            call_id: the sandbox's number of the call.
        """
        try:
            result = self._refusal(call) or await self._answer(call)
            await self._reply(call_id, result)
        except ConnectionError:
            # The socket is closed, which the reading task detects.
            pass
        except TimeoutError:
            self._end(
                BridgeOutcome(
                    limit=Limit.UNREAD,
                    error=f"the sandbox did not read an answer for {self._limits.unread_seconds:g} s",
                )
            )
        except Exception as exc:  # this task is not awaited
            self._fail(exc)

    def _refusal(self, call: StubCall) -> Raised | Stopped | None:
        """Return the answer to a call that must not be dispatched; None if it may be."""
        if self.calls > self._limits.max_calls:
            return self._refuse(
                "CallLimitError", f"a run may make {self._limits.max_calls} calls; do the rest in another run"
            )
        if call.token not in self._methods:
            return self._refuse("MethodNotFoundError", "this run may not call that method")
        if len(call.arguments) > self._limits.argument_bytes:
            return self._refuse(ARGUMENT_ERROR, f"arguments may have {self._limits.argument_bytes} bytes")
        if self._is_forbidden is not None and self._is_forbidden(call.arguments):
            return Stopped(stop=StopType.SECURITY)
        return None

    def _refuse(self, error_type: str, message: str) -> Raised:
        """Refuse a call without dispatching it; too many refused calls end the run.

        Refusals cost the host little and the run nothing: without a limit, code could keep its
        bridge busy for its whole wall time.
        """
        self._refusals += 1
        if self._refusals > self._limits.max_calls:
            words = f"{self._refusals} calls of the run were refused, the last one with: {message}"
            self._end(BridgeOutcome(limit=Limit.CALLS, error=words))
        return _refused(error_type, message)

    async def _answer(self, call: StubCall) -> StubResult:
        """Dispatch a call; whatever goes wrong becomes an error for the code."""
        method, dispatch = self._methods[call.token], self._host_methods.get(call.token, self._dispatch)
        seconds = method.timeout_seconds
        try:
            with contextlib.nullcontext() if seconds is None else self._waits.of(seconds):
                result = await dispatch(call)
        except TimeoutError:
            limit = "its time limit" if seconds is None else f"{seconds:g} s"
            return _refused("CallTimeoutError", f"{method.path} did not answer within {limit}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The plugin cancelled the call; the run continues and the caller gets an error.
            return _refused("CallCancelledError", "the call was cancelled")
        except Exception as exc:
            # dispatch translates its own errors; an unexpected one must be reported to the code.
            return _refused("InternalError", f"{method.path} could not be called ({type(exc).__name__})")
        if isinstance(result, Returned) and len(result.value) > self._limits.return_bytes:
            return _refused(
                "ResultError",
                f"{method.path} returned {len(result.value)} bytes; at most {self._limits.return_bytes} fit",
            )
        return result

    async def _reply(self, call_id: int, result: StubResult) -> None:
        if isinstance(result, Stopped):
            # Written at once, before pending sends: no later line of the code may run meanwhile.
            self._write(encode_frame(FrameKind.STOP))
            self._end(BridgeOutcome(stop=result.stop))
        elif isinstance(result, Returned):
            await self._send(FrameKind.RETURN, result.value, call_id=call_id)
        else:
            await self._send(FrameKind.RAISE, _encode_error(result), call_id=call_id)

    async def _send(self, kind: FrameKind, payload: bytes, *, call_id: int = 0) -> None:
        async with self._write_lock:
            self._write(encode_frame(kind, payload, call_id=call_id))
            if self._writer.transport.get_write_buffer_size():  # the kernel did not take all of it
                self._unread.begin()
                with self._waits.of(self._limits.unread_seconds):
                    await self._writer.drain()
                self._unread.done()

    def _write(self, data: bytes) -> None:
        if self._is_silent or self._writer.is_closing():  # event loops raise different errors here
            raise ConnectionResetError("the sandbox closed the socket")
        self._writer.write(data)


def _refused(error_type: str, message: str) -> Raised:
    return Raised(error_type=error_type, message=message)


def _encode_error(error: Raised) -> bytes:
    kinds = {ARGUMENT_ERROR: "argument", "CallTimeoutError": "timeout", "ApprovalDeniedError": "denied"}
    return json.dumps(
        {
            "kind": kinds.get(error.error_type, "method"),
            "type": error.error_type[:200],
            "message": error.message[:_ERROR_CHARS],
        }
    ).encode()


def _parse_exit(payload: bytes, *, readings_of: Callable[[bytes], str]) -> ExitReport:
    try:
        report: dict[str, Any] = json.loads(payload)
        code, error, limit = report["code"], report["error"], report["limit"]
        readings = _READINGS.fullmatch(report.get("readings", ""))
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise SandboxProtocolError("the sandbox sent a malformed EXIT frame") from exc
    if not isinstance(code, int) or not all(isinstance(text, str | None) for text in (error, limit)):
        raise SandboxProtocolError("the sandbox sent a malformed EXIT frame")
    if readings is None:
        raise SandboxProtocolError("the sandbox sent malformed readings with EXIT")
    return ExitReport(code=code, error=error, limit=limit, readings=readings_of((readings[1] or "").encode()))
