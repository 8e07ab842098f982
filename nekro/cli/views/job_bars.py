"""Progress bars of jobs, with rate and time left; plain lines where stdout is not a terminal.

Rate and remaining time are estimated from the percents that a job reports.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TextIO

from nekro.cli.output import Output, one_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from nekro_client.models import Job

__all__ = [
    "JobView",
    "Pace",
    "job_view",
    "rate_words",
    "state_of",
    "time_words",
]


#: Only the newest steps count: the rate of an hour ago does not predict the present one.
_RECENT_STEPS: Final = 10
#: Percents are whole numbers: a rate from a smaller difference would be a guess.
_FEWEST_PERCENTS: Final = 2

_MINUTE, _HOUR = 60, 3600


class Pace:
    """The rate of one job; call ``see`` whenever its row was read."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)

    def see(self, percent: int, *, now: float) -> None:
        """Record the percent of a row.

        Args:
            now: seconds of a monotonic clock.
        """
        if self._steps and percent < self._steps[-1][1]:
            self._steps.clear()  # the job was restarted
        if not self._steps or percent > self._steps[-1][1]:
            self._steps.append((now, percent))

    def per_second(self) -> float | None:
        """Percents per second; None while too little is known."""
        if not self._steps:
            return None
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        if last - first < _FEWEST_PERCENTS or ended <= began:
            return None
        return (last - first) / (ended - began)

    def seconds_left(self, *, now: float) -> float | None:
        """Seconds until 100 percent at this pace; None while it is not known."""
        rate = self.per_second()
        if not rate:
            return None
        seen_at, percent = self._steps[-1]
        return max((100 - percent) / rate - (now - seen_at), 0.0)


def rate_words(per_second: float | None) -> str:
    """Format a rate per s, min or h: the first that makes it at least 1, else per hour."""
    if not per_second:
        return ""
    if per_second >= 1:
        return f"{per_second:.1f} %/s"
    if per_second * _MINUTE >= 1:
        return f"{per_second * _MINUTE:.1f} %/min"
    return f"{per_second * _HOUR:.1f} %/h"


def time_words(seconds: float | None) -> str:
    """Format a remaining time: ``42s``, ``3:05``, ``2:00:00``; ``-:--`` while it is not known."""
    if seconds is None:
        return "-:--"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    hours, rest = divmod(whole, _HOUR)
    return (
        f"{hours}:{rest // _MINUTE:02}:{rest % _MINUTE:02}"
        if hours
        else f"{rest // _MINUTE}:{rest % _MINUTE:02}"
    )


_MESSAGE_COLUMNS: Final = 40
#: Columns after the bar, in this order.
_NO_WORDS: Final[dict[str, Any]] = {"rate": "", "left": "", "state": "", "words": ""}


class JobView(Protocol):
    """Shows jobs while they run."""

    def __enter__(self) -> Self:
        """Start to show."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; the last state stays on the screen."""
        ...

    def show(self, jobs: Sequence[Job]) -> None:
        """Show the current state of the jobs."""
        ...


def state_of(job: Job) -> str:
    """Return the state of a job as commands print it."""
    return "succeeded" if job.state == "done" else job.state


def job_view(output: Output) -> JobView:
    """Return bars for a terminal, lines for a pipe."""
    return _Bars(output) if output.is_terminal else _Lines(output)


class _Lines:
    """Prints one line per change."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._last: dict[str, tuple[object, ...]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            state = (job.state, job.percent, job.message)
            if self._last.get(job.id) != state:
                self._last[job.id] = state
                words = one_line(job.message)
                self._output.report(
                    f"{job.id}  {one_line(job.type)}  {state_of(job)}  {job.percent}%  {words}".rstrip()
                )


class _Bars:
    """A bar per job, drawn by rich; rate and time left come from ``Pace``, as percents are whole numbers."""

    def __init__(self, output: Output) -> None:
        self._progress = _progress(output.stdout)
        self._tasks: dict[str, TaskID] = {}
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            now, pace = time.monotonic(), self._paces[job.id]
            pace.see(job.percent, now=now)
            if job.id not in self._tasks:
                self._tasks[job.id] = self._progress.add_task(
                    f"{one_line(job.type)} {job.id[:8]}", total=100, **_NO_WORDS
                )
            task = self._tasks[job.id]
            words = one_line(job.message, limit=_MESSAGE_COLUMNS)
            fields = _fields(pace, now=now, state=state_of(job), words=words, is_open=job.finished_at is None)
            self._progress.update(task, completed=job.percent, **fields)
            if job.finished_at is not None:
                self._progress.stop_task(task)


def _fields(pace: Pace, *, now: float, state: str, words: str, is_open: bool) -> dict[str, Any]:
    left = time_words(pace.seconds_left(now=now)) if is_open else ""
    return {"rate": rate_words(pace.per_second()), "left": left, "state": state, "words": words}


def _progress(file: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    fields = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in _NO_WORDS]
    return Progress(
        # Names come from plugins: no markup.
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(markup=False),
        *fields,
        console=Console(file=file),
    )
