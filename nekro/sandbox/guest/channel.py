"""The sandbox's end of the socket: frames, calls from any thread, and the stubs that make them."""

from __future__ import annotations

import os
import sys
from _signal import (  # type: ignore[import-not-found]
    SIG_BLOCK,
    SIG_SETMASK,
    SIGUSR1,
    pthread_kill,
    pthread_sigmask,
    valid_signals,
)
from _socket import SHUT_WR, SO_RCVTIMEO, SOL_SOCKET, socket
from _struct import Struct
from _thread import RLock, allocate_lock, get_ident, start_new_thread
from _thread import _count as count_threads
from itertools import count
from time import monotonic, sleep
from typing import TYPE_CHECKING

from nekro.sandbox.guest.values import open_value, parse_signature, read_json
from nekro.wire.tagged import NotPlainError, TooLongError, write_arguments

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

__all__ = [
    "CALL",
    "CHANNEL",
    "CODE_NAME",
    "EXIT",
    "HELLO",
    "KEEP",
    "RUN",
    "ApprovalDeniedError",
    "Channel",
    "MethodError",
    "RunStopped",
    "Stub",
    "unsignalled",
]

HELLO, RUN, CALL, RETURN, RAISE, STOP, EXIT, KEEP = range(1, 9)
HEADER = Struct(">IBI")
ABANDONED = -1
ALL_SIGNALS = valid_signals()
#: File name of the code in frames and tracebacks.
CODE_NAME = "<code>"
#: How far the caller of a stub is looked for: libraries between it and the code are rarely deeper.
MOST_FRAMES = 50
#: The socket's descriptor.
CHANNEL = 3
#: Most bytes of one read, and of one while a longer frame arrives.
READ_BYTES, LONG_READ_BYTES = 1 << 16, 1 << 20
#: Receive timeout of the socket: one second, as a ``struct timeval``.
READ_TIMEOUT = Struct("ll").pack(1, 0)
#: How long a thread waits before it looks for its answer and for the role of the reader itself: what a
#: signal's handler raises may keep another thread from opening its gate.
GATE_SECONDS = 1.0
#: The same, and the receive timeout, at the end of the code while its last frames are sent.
LAST_SECONDS = 0.01
#: After STOP, how long clean-up code (``finally``, ``with``) may still run.
STOP_GRACE_SECONDS = 0.1
#: As long, for code whose variables are kept.
KEEP_GRACE_SECONDS = 1.5


class MethodError(Exception):
    """A plugin method failed; the message is ``<type>: <message>`` of the plugin's exception."""


class MethodTimeoutError(MethodError, TimeoutError):
    """A plugin method did not answer in time."""


class ApprovalDeniedError(MethodError):
    """A person denied the call, or no decision came in time; it did not run."""


class RunStopped(SystemExit):
    """The run is over; not an ``Exception``, so that ordinary handlers let it pass."""


class Waiter:
    """One call in flight; the thread that reads its answer stores it here and opens the gate."""

    def __init__(self) -> None:
        self._gate = allocate_lock()
        self._gate.acquire()
        self.thread = get_ident()
        #: Id of the call; 0 until it is being sent.
        self.id = 0
        #: Whether its thread may be given the role of the reader: not while it sends the call itself.
        self.may_read = False
        #: Kind of the answer; 0 until it arrives, ABANDONED when it is no longer awaited.
        self.kind = 0
        self.payload = b""
        #: Why another thread could not send the call.
        self.error: BaseException | None = None

    def wait(self, seconds: float) -> bool:
        """Wait for the answer, or for the role of the reader; False after so many seconds."""
        return self._gate.acquire(timeout=seconds)

    def go_on(self) -> None:
        """Open the gate."""
        try:
            self._gate.release()
        except RuntimeError as exc:  # it is open
            if is_of_handler(exc):
                raise


class Arrivals:
    """What was read from the socket and is not delivered yet.

    A signal's handler, a finaliser or a trace function may run between any two steps of the thread that
    reads, and read itself. So at no step do only the reader's own variables hold what was read: a chunk is
    read and stored by one call of the interpreter, and frames may be delivered twice.
    """

    def __init__(self) -> None:
        #: Chunks in the order in which they were read, each with its number.
        self._chunks: list[tuple[bytes, int]] = []
        self._numbers = count()
        #: Where the first frame that is not delivered begins in a chunk, by the number of the chunk.
        self._begins = {0: 0}

    def read(self, size: int) -> bool:
        """Read and store a chunk, if one arrives within the socket's timeout; False when an end is closed."""
        try:
            # No bytecode runs between the read, the number and the list; a handler may run before the read.
            self._chunks.extend(zip(map(os.read, (CHANNEL,), (size,)), self._numbers, strict=False))
        except OSError as exc:
            if exc.errno is None or is_of_handler(exc):
                raise
            return isinstance(exc, BlockingIOError)
        last = self._chunks[-1:]  # none when a handler's call has delivered them all
        return not last or bool(last[0][0])

    def undelivered(self) -> tuple[int, int, bytes, int]:
        """Return where the first undelivered frame begins, and what has arrived.

        Returns:
            The number of the chunk in which the frame begins, -1 if there is none; its place in that chunk;
            the data from that chunk on, or that chunk alone while the frame is incomplete; the size of all.
        """
        chunks = list(self._chunks)
        begin = None
        while chunks and (begin := self._begins.get(chunks[0][1])) is None:
            del chunks[0]
        if begin is None:
            return -1, 0, b"", 0
        data, number = chunks[0]
        parts = [part for part, _ in chunks]
        size = sum(map(len, parts))
        # Joined only once for each frame: a long one arrives in many chunks.
        if len(parts) > 1 and (len(data) < begin + HEADER.size or end_of_frame(data, begin) <= size):
            data = b"".join(parts)
        return number, begin, data, size

    def forget(self, number: int, end: int) -> None:
        """Forget what lies before the place ``end``, counted from the beginning of the chunk ``number``."""
        chunks = [chunk for chunk in list(self._chunks) if chunk[1] >= number]
        if not chunks or chunks[0][1] != number:  # a handler's call has done it
            return
        passed = []
        for chunk in chunks:
            if end < len(chunk[0]):
                break
            end -= len(chunk[0])
            passed.append(chunk)
            number = chunk[1] + 1
        self._begins[number] = end
        for chunk in passed:
            try:
                self._chunks.remove(chunk)
            except ValueError as exc:  # a handler's call has done it
                if is_of_handler(exc):
                    raise
            self._begins.pop(chunk[1], None)


class Channel:
    """The socket to the bridge. Any thread may call; one of the waiting threads reads for all of them.

    A dedicated reader thread would have to be woken for each answer, and wake the caller in turn. So the
    first caller reads until its own answer arrives, and then passes the role to another caller. What was
    read is kept until it is delivered: a signal's handler may raise at any moment, or make a call itself,
    and no answer is lost.
    """

    def __init__(self) -> None:
        # Reentrant: a signal's handler may run, and call, while its thread holds a lock.
        self._send_lock = RLock()
        #: All calls in the order in which they began: of a thread's calls, the last one is the innermost.
        self._calls: list[Waiter] = []
        #: Those whose sending has begun, by id.
        self._waiters: dict[int, Waiter] = {}
        self._ids = count(1)
        #: Ids of calls whose answer was not read.
        self._unanswered: set[int] = set()
        self._arrivals = Arrivals()
        #: Exit code of the process when the host closes its end.
        self._exit_code = 1
        #: Thread that reads; 0 when none does.
        self._reader = 0
        self._stopped = False
        #: Whether the code has ended, so that no call may be sent.
        self._is_over = False
        #: Whether a stopped process waits until the host ends it: freeing its memory and mounts keeps a
        #: processor busy that the host may need for the result.
        self.lingers = False
        self._main_thread = get_ident()
        self._main_thread_waits = False
        #: Whether the main thread itself sends a call.
        self._main_thread_sends = False
        self.owner = os.getpid()
        self.argument_bytes = 0
        #: Returns what a call says of the readings since the last one.
        self.take_readings: Callable[[], bytes] = bytes
        #: Returns what to call when a call with these arguments has ended; None: nothing.
        self.watch_files: Callable[[bytes], Callable[[], None] | None] | None = None
        self.grace_seconds = STOP_GRACE_SECONDS
        self._socket = socket(fileno=CHANNEL)
        # The kernel's own limit: a select before each read would be a call more.
        self._socket.setsockopt(SOL_SOCKET, SO_RCVTIMEO, READ_TIMEOUT)
        # A forked child shares the socket and would mix its frames with its parent's.
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        try:  # noqa: SIM105 - contextlib is slow to import
            os.close(self._socket.detach())
        except OSError:
            pass

    def send(self, kind: int, payload: bytes, call_id: int = 0) -> None:
        """Write one whole frame; blocks while the bridge has the maximum of calls in flight."""
        data = memoryview(HEADER.pack(len(payload) + 5, kind, call_id) + payload)
        while data:
            data = data[os.write(CHANNEL, data) :]

    def send_last(self, kind: int, payload: bytes, seconds: float | None = None) -> None:
        """Send a frame of the code's end, EXIT or KEEP, behind those that other threads are sending.

        While answers are missing, the bridge may accept a frame only after they were read. So a thread of its
        own sends it, and this one takes turns to read. After EXIT no call is sent.

        Args:
            seconds: how long other frames may take; None: as long as they need.

        Raises:
            TimeoutError: they took longer.
        """
        last = Waiter()
        self._is_over = kind == EXIT
        if self._unanswered and start_thread(self._send_apart, last, self._send_end, kind, payload):
            self._socket.setsockopt(SOL_SOCKET, SO_RCVTIMEO, Struct("ll").pack(0, int(LAST_SECONDS * 1e6)))
        else:
            self._send_apart(last, self._send_end, kind, payload)
        ends = None if seconds is None else monotonic() + seconds
        self._calls.append(last)
        while not last.kind and (ends is None or monotonic() < ends):
            if not last.wait(LAST_SECONDS) and self._takes_role(last.thread):
                self._deliver(last)
                if not last.kind and not self._arrivals.read(READ_BYTES):
                    break
        is_sent, last.kind = bool(last.kind), last.kind or ABANDONED
        self._calls.remove(last)
        self._pass_on(last.thread)
        if not is_sent:
            raise TimeoutError("a thread is still sending a call")
        if last.error is not None:
            raise last.error

    def _send_end(self, last: Waiter, kind: int, payload: bytes) -> None:
        with self._send_lock:
            if not last.kind:
                self.send(kind, payload)
                last.kind = kind

    def receive(self) -> tuple[int, int, bytes]:
        """Read one whole frame.

        Raises:
            EOFError: the bridge has closed the socket.
        """
        length, kind, call_id = HEADER.unpack(self._exactly(HEADER.size))
        return kind, call_id, self._exactly(length - 5)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                data = os.read(CHANNEL, min(count - len(parts), 1 << 20))
            except BlockingIOError:
                continue
            if not data:
                raise EOFError
            parts += data
        return bytes(parts)

    def call(self, token: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method and wait for its answer."""
        if os.getpid() != self.owner:
            raise MethodError(
                "plugin methods can be called from the code's own process only, not from a fork"
            )
        waiter = Waiter()
        arguments = self._encode(args, kwargs)
        check_files = None if self.watch_files is None else self.watch_files(arguments)
        me, outer = get_ident(), self._main_thread_waits
        # A signal's handler calls while this thread reads.
        is_nested = self._reader == me and self._waits(me)
        try:
            self._calls.append(waiter)
            self._post(waiter, token.encode(), arguments)
            waiter.may_read = True
            if me == self._main_thread:
                self._main_thread_waits = True
            if is_nested or self._takes_role(me):
                self._read_until(waiter)
            while not waiter.kind:
                self._wake_reader()
                if not waiter.wait(GATE_SECONDS):
                    self._free_role()
                if self._takes_role(me):
                    self._read_until(waiter)
        finally:
            waiter.kind = waiter.kind or ABANDONED
            if waiter in self._calls:
                self._calls.remove(waiter)
            self._waiters.pop(waiter.id, None)
            if me == self._main_thread:
                self._main_thread_waits = outer
            if not is_nested:
                self._pass_on(me)
        if check_files is not None:
            check_files()
        if self._stopped:  # after the answer and before this thread went on
            raise RunStopped(0)
        return unsignalled(open_answer, waiter) if me == self._main_thread else open_answer(waiter)

    def _post(self, waiter: Waiter, token: bytes, arguments: bytes) -> None:
        """Send a call so that no signal's handler runs while its frame is partly written.

        Handlers run in the main thread only. While nothing else can fill the socket, it blocks signals, and
        the kernel writes the frame as a whole. Otherwise the bridge may take the frame only after answers
        were read: a thread of its own sends it, and the main thread reads meanwhile. A thread of a library,
        or one that is about to end, may receive a signal nevertheless: its handler runs before or after the
        frame is written.
        """
        if get_ident() != self._main_thread:
            self._send_call(waiter, token, arguments)
            return
        # Below a call that holds the lock, another thread would wait for it forever.
        if (
            self._main_thread_sends
            or not (self._unanswered or count_threads())
            or not start_thread(self._send_apart, waiter, self._send_call, token, arguments)
        ):
            unsignalled(self._send_directly, waiter, token, arguments)

    def _send_directly(self, waiter: Waiter, token: bytes, arguments: bytes) -> None:
        outer = self._main_thread_sends
        try:
            self._main_thread_sends = True
            self._send_call(waiter, token, arguments)
        finally:
            self._main_thread_sends = outer

    def _send_apart(self, waiter: Waiter, send: Callable[..., None], *args: Any) -> None:
        """Send a frame of the main thread, which raises what goes wrong here."""
        try:
            send(waiter, *args)
        except BaseException as exc:
            waiter.error = exc
            waiter.kind = waiter.kind or ABANDONED
        if waiter.kind:
            waiter.go_on()

    def _send_call(self, waiter: Waiter, token: bytes, arguments: bytes) -> None:
        with self._send_lock:
            if self._stopped or self._is_over:
                raise RunStopped(0)
            if waiter.kind or waiter.id:  # its caller was interrupted and has gone on
                return
            waiter.id = next(self._ids)
            self._waiters[waiter.id] = waiter
            self._unanswered.add(waiter.id)
            self.send(CALL, token + self.take_readings() + b"\0" + arguments, waiter.id)
            if waiter.kind:
                self._waiters.pop(waiter.id, None)

    def _wake_reader(self) -> None:
        """Open the gates of the reading thread: a handler may have interrupted ``_pass_on`` before it did."""
        for waiter in list(self._calls):
            if waiter.thread == self._reader:
                waiter.go_on()

    # The role has no lock: a handler may run, and call, while its thread holds one, and wait for threads that
    # wait for that lock. CPython runs handlers and switches threads only at calls and loops, so nothing comes
    # between a comparison and a store without these.

    def _takes_role(self, me: int) -> bool:
        if not self._reader:
            self._reader = me
        return self._reader == me

    def _free_role(self) -> None:
        """Free the role of a thread that waits for no answer: it was interrupted before it passed it on."""
        reader = self._reader
        is_waiting = self._waits(reader)
        if not is_waiting and self._reader == reader:
            self._reader = 0

    def _waits(self, thread: int) -> bool:
        """Whether an answer to a call of a thread is missing."""
        # Of a copy: a call that another thread removes would hide the one behind it.
        return any(call.thread == thread and not call.kind for call in list(self._calls))

    def _pass_on(self, me: int) -> None:
        """Pass the role of the reader to a thread that waits, if there is one; unless another one has it.

        A thread that begins to wait meanwhile finds the role free, or is found.
        """
        while self._reader in (0, me):
            waiter = self._next_reader()
            if waiter is None and not self._reader:
                return
            if self._reader in (0, me) and (waiter is None or not waiter.kind):
                self._reader = 0 if waiter is None else waiter.thread
                if waiter is not None:
                    waiter.go_on()
                    return

    def _next_reader(self) -> Waiter | None:
        """The newest call whose thread may read.

        Not a thread that is sending: the bridge accepts no further call while answers are not read. After
        that it takes the role itself if it is free. Of a thread's calls the innermost one decides; the
        others lie below a signal's handler.
        """
        sending = set()
        for waiter in reversed(list(self._calls)):
            if not waiter.may_read:
                sending.add(waiter.thread)
            elif not waiter.kind and waiter.thread not in sending:
                return waiter
        return None

    def _read_until(self, mine: Waiter) -> None:
        """Deliver answers until there is one for ``mine``."""
        while True:
            missing = self._deliver(mine)
            if mine.kind:
                return
            # With a timeout, because a call in a signal's handler may read the awaited answer.
            if not self._arrivals.read(READ_BYTES if missing < READ_BYTES else LONG_READ_BYTES):
                os._exit(self._exit_code)

    def _deliver(self, mine: Waiter) -> int:
        """Deliver the frames that have arrived; return how many bytes the next one lacks at least."""
        number, begin, data, size = self._arrivals.undelivered()
        start = begin
        while (end := end_of_frame(data, begin)) <= len(data):
            _, kind, call_id = HEADER.unpack_from(data, begin)
            self._hand_out(kind, call_id, data[begin + HEADER.size : end], mine)
            begin = end
        if begin > start:
            self._arrivals.forget(number, begin)
        return end - size

    def _hand_out(self, kind: int, call_id: int, payload: bytes, mine: Waiter) -> None:
        if kind == STOP:
            self._stop(mine)
            return
        # A frame may be handed out twice; a call that has ended is no longer among the waiters.
        waiter = self._waiters.get(call_id)
        if waiter is not None and not waiter.kind:
            waiter.payload = payload
            waiter.kind = kind
        if waiter is not None and waiter is not mine:
            waiter.go_on()
        self._unanswered.discard(call_id)

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        size = most = self.argument_bytes
        try:
            arguments = write_arguments(args, kwargs, most, simplifies=True).encode()
            size = len(arguments)
        except UnicodeEncodeError:
            raise TypeError(
                "an argument cannot be sent to a plugin: a text is not valid Unicode (a lone surrogate?)"
            ) from None
        except NotPlainError as exc:
            raise TypeError(f"an argument cannot be sent to a plugin: {exc}") from None
        except TooLongError:
            size += 1
        if size > most:
            raise TypeError(
                f"the arguments have more than the allowed {most} bytes;"
                " write large data to ./shared and pass its path"
            )
        return arguments

    def _stop(self, mine: Waiter) -> None:
        """Raise ``RunStopped`` in the main thread and in every waiting thread; end the process soon."""
        self._stopped = True
        interrupt_main = not self._main_thread_waits
        for waiter in list(self._calls):
            waiter.kind = STOP
            if waiter is not mine:
                waiter.go_on()
        mine.kind = STOP
        start_thread(self._finish_soon)  # without it, the host ends a process that does not end
        if interrupt_main:
            pthread_kill(self._main_thread, SIGUSR1)

    def _finish_soon(self) -> NoReturn:
        """End the process after the time for clean-up code."""
        sleep(self.grace_seconds)
        self.finish(0)

    def finish(self, code: int) -> NoReturn:
        """Flush, close the write side of the socket, and end without running more code."""
        for stream in (sys.stdout, sys.stderr):
            try:  # noqa: SIM105 - contextlib is slow to import
                stream.flush()
            except Exception:  # noqa: S110 - the code may have closed or replaced it
                pass
        if os.getpid() == self.owner:
            self._exit_code = code  # of a thread that still waits for an answer
            try:
                self._socket.shutdown(SHUT_WR)  # the kernel closes it later, after it has freed the memory
                # The host closes its end when it has read all. If it wrote an answer to an ended process, its
                # connection would be reset, and frames that it has not read yet would be lost.
                lingers = self.lingers if self._stopped else bool(self._unanswered)
                while lingers and self._reads_more():
                    pass
            except OSError:  # the code has closed it
                pass
        os._exit(code)

    def _reads_more(self) -> bool:
        try:
            return bool(self._socket.recv(READ_BYTES))
        except BlockingIOError:
            return True


def is_of_handler(exc: BaseException) -> bool:
    """Whether a signal's handler raised what is caught here around a call of a function in C."""
    return exc.__traceback__ is not None and exc.__traceback__.tb_next is not None


def start_thread(function: Callable[..., None], *args: Any) -> bool:
    """Start a thread; False when there can be no more."""
    try:
        start_new_thread(function, args)
    except RuntimeError as exc:
        if is_of_handler(exc):
            raise
        return False
    return True


def unsignalled(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function while this thread blocks signals: what a handler raises comes before it or after it."""
    before = pthread_sigmask(SIG_BLOCK, ())
    try:
        pthread_sigmask(SIG_BLOCK, ALL_SIGNALS)
        return function(*args)
    finally:
        pthread_sigmask(SIG_SETMASK, before)


def end_of_frame(data: bytes, begin: int) -> int:
    """Return the end of the frame at ``begin``; beyond the data when the header is incomplete."""
    if len(data) < begin + HEADER.size:
        return begin + HEADER.size
    length: int = HEADER.unpack_from(data, begin)[0]
    return begin + 4 + length


def open_answer(waiter: Waiter) -> Any:
    """Return a call's value or raise its error."""
    if waiter.error is not None:
        raise waiter.error
    if waiter.kind == RETURN:
        try:
            return open_value(waiter.payload)
        except Exception as exc:
            raise MethodError(f"the value cannot be opened here: {type(exc).__name__}: {exc}") from None
    if waiter.kind != RAISE:
        raise RunStopped(0)
    error = read_json(waiter.payload.decode())
    if error["kind"] == "argument":
        raise TypeError(error["message"])
    cls = {"timeout": MethodTimeoutError, "denied": ApprovalDeniedError}.get(error["kind"], MethodError)
    raise cls(f"{error['type']}: {error['message']}" if error["message"] else error["type"])


def code_line(frame: Any) -> str:
    """Return the innermost line of the code above a frame, as calls carry it; "" if none is found."""
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_filename == CODE_NAME:
            # A trace function, and code that was built by hand, may have set any number, or None.
            return f"@{frame.f_lineno}" if 0 < (frame.f_lineno or 0) < 10_000_000 else ""
        frame = frame.f_back
    return ""


class Stub:
    """A plugin method, as code in the sandbox sees it."""

    def __init__(self, channel: Channel, spec: dict[str, Any]) -> None:
        self._call = channel.call
        self._token = spec["token"]
        self._signature_text = spec["signature"]
        self.__name__ = self.__qualname__ = spec["path"].rpartition(".")[2]
        self.__module__ = spec["path"].rpartition(".")[0]
        self.__doc__ = spec["doc"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._token + code_line(sys._getframe(1)), args, kwargs)

    def __repr__(self) -> str:
        return f"<plugin method {self.__module__}.{self.__name__}{self._signature_text}>"

    @property
    def __signature__(self) -> Any:
        """The method's signature; built when asked for."""
        return parse_signature(self._signature_text)
