"""The sandbox's end of the socket: frames, calls from any thread, and the stubs that make them."""

from __future__ import annotations

import os
import struct
import sys
import time
from _pickle import dumps, loads
from _signal import SIGUSR1, pthread_kill  # type: ignore[import-not-found]
from _thread import allocate_lock, get_ident, start_new_thread
from typing import TYPE_CHECKING

from sandbox.guest.signatures import parse_signature
from sandbox.guest.values import open_value

if TYPE_CHECKING:
    from typing import Any, NoReturn

__all__ = [
    "CALL",
    "CHANNEL",
    "EXIT",
    "HELLO",
    "RUN",
    "Channel",
    "MethodError",
    "RunStopped",
    "Stub",
    "finish",
]

HELLO, RUN, CALL, RETURN, RAISE, STOP, EXIT = range(1, 8)
HEADER = struct.Struct(">IBI")
#: The socket's descriptor.
CHANNEL = 3
#: After STOP, how long clean-up code (``finally``, ``with``) may still run.
STOP_GRACE_SECONDS = 0.1


class MethodError(Exception):
    """A plugin method failed; the message is ``<type>: <message>`` of the plugin's own error."""


class MethodTimeoutError(MethodError, TimeoutError):
    """A plugin method did not answer in time."""


class RunStopped(SystemExit):
    """The run is over; not an ``Exception``, so that ordinary handlers let it pass."""


class Waiter:
    """One call on its way; the reading thread puts the answer and opens the gate."""

    def __init__(self) -> None:
        self._gate = allocate_lock()
        self._gate.acquire()
        self.kind = STOP
        self.payload = b""

    def answer(self, kind: int, payload: bytes) -> None:
        """Let the caller go on."""
        self.kind, self.payload = kind, payload
        self._gate.release()

    def wait(self) -> None:
        """Wait for the answer."""
        self._gate.acquire()


class Channel:
    """The socket to the bridge. Any thread may call; one thread reads, from the first call on."""

    def __init__(self) -> None:
        self._send_lock = allocate_lock()
        self._waiters: dict[int, Waiter] = {}
        self._last_id = 0
        self._reading = False
        self._stopped = False
        self._main_thread = get_ident()
        self._main_thread_waits = False
        self.owner = os.getpid()
        self.argument_bytes = 0
        # A forked child shares the socket and would mix its frames with its parent's.
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        try:  # noqa: SIM105 - contextlib is slow to import
            os.close(CHANNEL)
        except OSError:
            pass

    def send(self, kind: int, payload: bytes, call_id: int = 0) -> None:
        """Write one whole frame; blocks while the bridge has enough calls in hand."""
        data = memoryview(HEADER.pack(len(payload) + 5, kind, call_id) + payload)
        while data:
            data = data[os.write(CHANNEL, data) :]

    def receive(self) -> tuple[int, int, bytes]:
        """Read one whole frame.

        Raises:
            EOFError: the bridge is gone.
        """
        length, kind, call_id = HEADER.unpack(self._exactly(HEADER.size))
        return kind, call_id, self._exactly(length - 5)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            data = os.read(CHANNEL, min(count - len(parts), 1 << 20))
            if not data:
                raise EOFError
            parts += data
        return bytes(parts)

    def call(self, token: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, plain: bool = False) -> Any:
        """Call a method and wait for its answer; ``plain`` sends the positional arguments as JSON."""
        if os.getpid() != self.owner:
            raise MethodError(
                "plugin methods can be called from the code's own process only, not from a fork"
            )
        waiter = Waiter()
        arguments = encode_plain(args) if plain else self._encode(args, kwargs)
        in_main = get_ident() == self._main_thread
        with self._send_lock:
            if self._stopped:
                raise RunStopped(0)
            if not self._reading:
                self._reading = True
                start_new_thread(self._read_answers, ())
            self._last_id += 1
            self._waiters[self._last_id] = waiter
            self.send(CALL, token.encode() + b"\0" + arguments, self._last_id)
        self._main_thread_waits |= in_main
        waiter.wait()
        if in_main:
            self._main_thread_waits = False
        return open_answer(waiter)

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        try:
            arguments = dumps((args, kwargs), 4)
        except Exception as exc:
            raise TypeError(f"an argument cannot be sent to a plugin: {exc}") from None
        if len(arguments) > self.argument_bytes:
            raise TypeError(
                f"the arguments have {len(arguments)} bytes, at most {self.argument_bytes} can be sent;"
                " write large data to ./shared and pass its path"
            )
        return arguments

    def _read_answers(self) -> None:
        while True:
            try:
                kind, call_id, payload = self.receive()
            except (EOFError, OSError):
                os._exit(1)
            if kind == STOP:
                self._stop()
            waiter = self._waiters.pop(call_id, None)
            if waiter is not None:
                waiter.answer(kind, payload)

    def _stop(self) -> NoReturn:
        """Raise ``RunStopped`` in every thread that waits and in the main one, then end the process."""
        self._stopped = True
        interrupt_main = not self._main_thread_waits
        for waiter in list(self._waiters.values()):
            waiter.answer(STOP, b"")
        if interrupt_main:
            pthread_kill(self._main_thread, SIGUSR1)
        time.sleep(STOP_GRACE_SECONDS)
        finish(0)


def encode_plain(args: tuple[Any, ...]) -> bytes:
    """Encode positional arguments for a method that the host itself answers."""
    import json

    return json.dumps(args).encode()


def open_answer(waiter: Waiter) -> Any:
    """Return a call's value or raise its error."""
    if waiter.kind == RETURN:
        try:
            return open_value(waiter.payload)
        except Exception as exc:
            raise MethodError(f"the value cannot be opened here: {type(exc).__name__}: {exc}") from None
    if waiter.kind != RAISE:
        raise RunStopped(0)
    error = loads(waiter.payload)
    if error["kind"] == "argument":
        raise TypeError(error["message"])
    cls = MethodTimeoutError if error["kind"] == "timeout" else MethodError
    raise cls(f"{error['type']}: {error['message']}" if error["message"] else error["type"])


class Stub:
    """A plugin method, as code in the sandbox sees it."""

    def __init__(self, channel: Channel, spec: dict[str, Any]) -> None:
        self._call = channel.call
        self._token = spec["token"]
        self._plain = spec["plain"]
        self._signature_text = spec["signature"]
        self.__name__ = self.__qualname__ = spec["path"].rpartition(".")[2]
        self.__module__ = spec["path"].rpartition(".")[0]
        self.__doc__ = spec["doc"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._token, args, kwargs, plain=self._plain)

    def __repr__(self) -> str:
        return f"<plugin method {self.__module__}.{self.__name__}{self._signature_text}>"

    @property
    def __signature__(self) -> Any:
        """The method's signature; built when asked for."""
        return parse_signature(self._signature_text)


def finish(code: int) -> NoReturn:
    """Flush and end without running anything more."""
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - contextlib is slow to import
            stream.flush()
        except Exception:  # noqa: S110 - the code may have closed or replaced it
            pass
    os._exit(code)
