"""Progress bars of jobs, with rate and time left; plain lines where stdout is not a terminal."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TextIO

from nekro.cli.output import Output, one_line
from nekro.cli.views.job_pace import Pace, rate_words, time_words

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from storage.repositories.jobs import Job

__all__ = ["JobView", "job_view"]

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
                    f"{job.id}  {one_line(job.type)}  {job.state.value}  {job.percent}%  {words}".rstrip()
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
            fields = _fields(
                pace, now=now, state=job.state.value, words=words, is_open=not job.state.is_final
            )
            self._progress.update(task, completed=job.percent, **fields)
            if job.state.is_final:
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
