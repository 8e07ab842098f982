"""Clocks whose values the host keeps, so that a program that is run again reads the same ones.

Each value that the code reads is a *reading*. The next call takes the readings since the last one to the host
(``Channel``), and a program that is run again gets all of them: its clocks show the same values in the same
order until these end. Then they go on from there: a monotonic clock continues at its last value, the time
of day at the present time, and none goes backwards.

The clocks are replaced once, before a package is imported, so that names that modules bind at their import
(``from time import time``) are replaced too. What does not come from here, and differs in each attempt:
``numpy.datetime64("now")`` and the clocks of other C libraries, times of files, the clocks of processes that
the code starts, ``time.clock_gettime`` of rare clocks, ``os.times`` and ``resource.getrusage``.

The text of readings: ``<letter of the clock><difference from its last reading, nanoseconds in base 36>``,
joined by commas.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from _thread import allocate_lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

__all__ = ["CLOCKS", "READINGS", "Unbound", "replace_clocks", "replace_datetime", "unbound"]

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
#: As on the host (``nekro.sandbox.models``): of one call, and of all.
READINGS_BYTES, MOST_READINGS_BYTES = 64 << 10, 1 << 20
#: Says that the program cannot be run again, as it has read more than that.
TOO_MANY = b"~!"
#: Readings that are kept until the next call; more of them would not fit.
MOST_NOTES = READINGS_BYTES // 3


class Clock:
    """One clock: its replayed values, then its own."""

    def __init__(self, letter: str, live: Callable[[], int], *, shifts: bool = True) -> None:
        """
        Args:
            live: returns the clock's value in nanoseconds.
            shifts: whether it goes on from the last replayed value; False: at its own value, unless that is
                earlier.
        """
        self.letter = letter
        self._live = live
        self._shifts = shifts
        #: Values of an earlier attempt, the last one first.
        self.replayed: list[int] = []
        #: The reading that was written last.
        self.written = 0
        self._shift = 0

    def read(self) -> int:
        """Return the time in nanoseconds, and note it."""
        if self.replayed:
            try:
                value = self.replayed.pop()
            except IndexError:  # another thread has read the last one
                return self.read()
            if not self.replayed:
                shift = value - self._live()
                self._shift = shift if self._shifts or shift > 0 else 0
            return value
        value = self._live() + self._shift
        notes = READINGS.notes
        if notes is not None:
            notes.append((self, value))
            if len(notes) > MOST_NOTES:
                READINGS.give_up()
        return value


class Readings:
    """What the code has read since its last call."""

    def __init__(self) -> None:
        #: None while nothing is noted: no code runs yet, or the program cannot be run again.
        self.notes: list[tuple[Clock, int]] | None = None
        self._lock = allocate_lock()
        self._bytes = 0
        self._is_lost = False

    def begin(self, text: str) -> None:
        """Begin to note; first replay the readings of an earlier attempt."""
        by_letter: dict[str, list[int]] = {}
        for item in text.split(",") if text else ():
            clock = CLOCKS.get(item[:1])
            if clock is not None:
                try:
                    clock.written += int(item[1:], 36)
                except ValueError:  # the lost attempt wrote it by other means
                    break
                by_letter.setdefault(clock.letter, []).append(clock.written)
        for letter, values in by_letter.items():
            CLOCKS[letter].replayed = values[::-1]
        self._bytes = len(text)
        self.notes = []

    def give_up(self) -> None:
        """Note no more: the program cannot be run again."""
        self.notes, self._is_lost = None, True

    def take(self) -> bytes:
        """Return what the next call says of the readings since the last one; they are forgotten here."""
        if self._is_lost:
            return TOO_MANY
        if not self.notes:
            return b""
        with self._lock:
            notes = self.notes[:]
            del self.notes[: len(notes)]  # other threads may have added some
            text = ",".join([note(clock, value) for clock, value in notes])
        self._bytes += len(text)
        if len(text) > READINGS_BYTES or self._bytes > MOST_READINGS_BYTES:
            self.give_up()
            return TOO_MANY
        return b"~" + text.encode()


def note(clock: Clock, value: int) -> str:
    """Write a reading."""
    number, clock.written = value - clock.written, value
    digits = "" if number else "0"
    sign = "-" if number < 0 else ""
    number = abs(number)
    while number:
        number, digit = divmod(number, 36)
        digits = DIGITS[digit] + digits
    return clock.letter + sign + digits


READINGS = Readings()
CLOCKS = {
    clock.letter: clock
    for clock in (
        Clock("t", time.time_ns, shifts=False),
        Clock("m", time.monotonic_ns),
        Clock("p", time.process_time_ns),
        Clock("h", time.thread_time_ns),
    )
}
#: The clocks of ``time.clock_gettime``.
LETTERS = {
    time.CLOCK_REALTIME: "t",
    time.CLOCK_MONOTONIC: "m",
    time.CLOCK_PROCESS_CPUTIME_ID: "p",
    time.CLOCK_THREAD_CPUTIME_ID: "h",
}


class Unbound(staticmethod):  # type: ignore[type-arg]
    """A function that replaces a built-in one; like that it never becomes a method of a class."""

    def __reduce__(self) -> str:
        """Pickle and copy it by its name, as a function."""
        return self.__name__


#: Where replaced functions are found, by the modules that define the originals and keep them.
PUBLIC_MODULES = {"posix": "os", "_sqlite3": "sqlite3"}


def unbound(original: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that replaces a built-in one."""

    def replace(function: Callable[..., Any]) -> Any:
        function.__name__ = function.__qualname__ = original.__name__
        function.__module__ = PUBLIC_MODULES.get(original.__module__, original.__module__)
        function.__doc__ = original.__doc__
        return Unbound(function)

    return replace


def replace_clocks() -> None:
    """Replace the clocks of ``time``."""
    for name, letter in (("time", "t"), ("monotonic", "m"), ("perf_counter", "m"), ("process_time", "p"),
                         ("thread_time", "h")):  # fmt: skip
        read = CLOCKS[letter].read
        setattr(time, name, unbound(getattr(time, name))(in_seconds(read)))
        setattr(time, f"{name}_ns", unbound(getattr(time, f"{name}_ns"))(in_nanoseconds(read)))
    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, of_now(getattr(time, name)))
    replace_calendar(time.asctime, time.strftime, time.localtime)
    replace_clock_gettime(time.clock_gettime, time.clock_gettime_ns)


def in_seconds(read: Callable[[], int]) -> Callable[[], float]:
    """Return a clock as a function."""
    return lambda: read() / 1e9


def in_nanoseconds(read: Callable[[], int]) -> Callable[[], int]:
    """Return a clock as a function, which is no method as ``read`` is."""
    return lambda: read()


def of_now(convert: Any) -> Any:
    """Return a conversion of a time, by default of the present one."""
    now = CLOCKS["t"].read

    @unbound(convert)
    def converted(seconds: Any = None, /) -> Any:
        return convert(now() // 10**9 if seconds is None else seconds)

    return converted


def replace_calendar(asctime: Any, strftime: Any, localtime: Any) -> None:
    """Replace the functions that take a broken-down time, by default of the present one."""

    @unbound(asctime)
    def text_of(*moment: Any) -> str:
        return asctime(*(moment or (localtime(),)))  # type: ignore[no-any-return]

    @unbound(strftime)
    def formatted(form: Any, *moment: Any) -> str:
        return strftime(form, *(moment or (localtime(),)))  # type: ignore[no-any-return]

    time.asctime, time.strftime = text_of, formatted


def replace_clock_gettime(seconds_of: Any, nanoseconds_of: Any) -> None:
    """Replace the functions that take the id of a clock."""

    @unbound(seconds_of)
    def seconds(clk_id: Any, /) -> float:
        letter = LETTERS.get(clk_id)
        return seconds_of(clk_id) if letter is None else CLOCKS[letter].read() / 1e9

    @unbound(nanoseconds_of)
    def nanoseconds(clk_id: Any, /) -> int:
        letter = LETTERS.get(clk_id)
        return nanoseconds_of(clk_id) if letter is None else CLOCKS[letter].read()

    time.clock_gettime, time.clock_gettime_ns = seconds, nanoseconds


#: Built-in methods that were replaced: the interpreter may hold references to them that it does not count.
REPLACED: list[Any] = []


def replace_datetime(module: ModuleType) -> None:
    """Replace ``datetime.now``, ``datetime.utcnow`` and ``date.today``, also where the classes are in use.

    A built-in class takes no assignment. Its dictionary does, and the setter of ``__abstractmethods__`` makes
    the interpreter forget what it has looked up in a class of any kind. Tested on CPython 3.11 to 3.13.
    """
    day, moment, utc = module.date, module.datetime, module.timezone.utc
    read, from_seconds = CLOCKS["t"].read, moment.__dict__["fromtimestamp"]

    def at(cls: Any, zone: Any) -> Any:
        # Microseconds are exact in a float. As the original, it calls no `fromtimestamp` of a subclass.
        return from_seconds.__get__(None, cls)(read() // 1000 / 1e6, zone)

    def now(cls: Any, tz: Any = None) -> Any:
        return at(cls, tz)

    def utcnow(cls: Any) -> Any:
        if sys.version_info >= (3, 12):
            import warnings

            words = (
                "datetime.datetime.utcnow() is deprecated and scheduled for removal in a future version. Use"
                " timezone-aware objects to represent datetimes in UTC: datetime.datetime.now(datetime.UTC)."
            )
            warnings.warn(words, DeprecationWarning, stacklevel=2)
        return at(cls, utc).replace(tzinfo=None)

    def today(cls: Any) -> Any:
        return cls.fromtimestamp(read() / 1e9)

    for cls, function in ((moment, now), (moment, utcnow), (day, today)):
        names = gc.get_referents(cls.__dict__)[0]
        original = names[function.__name__]
        function.__qualname__, function.__doc__ = original.__qualname__, original.__doc__
        REPLACED.append(original)
        names[function.__name__] = classmethod(function)
        forget = type.__dict__["__abstractmethods__"]
        forget.__set__(cls, frozenset())
        forget.__delete__(cls)


def forget_in_forks() -> None:
    """Note nothing in a fork, which sends no calls."""
    READINGS.notes = None


os.register_at_fork(after_in_child=forget_in_forks)
