"""Progress bars of jobs, with rate and time left; plain lines where nobody looks at a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from cli.output import Output, one_line

if TYPE_CHECKING:
    from rich.progress import Progress, Task, TaskID

    from storage.jobs import Job

__all__ = ["JobView", "job_view"]

_MESSAGE_COLUMNS = 40


class JobView(Protocol):
    """Shows jobs while they run."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last picture standing."""
        ...

    def show(self, jobs: Sequence[Job]) -> None:
        """Show how far they are now."""
        ...


def job_view(output: Output) -> JobView:
    """Return bars for a terminal, lines for a pipe."""
    return _Bars(output) if output.is_terminal else _Lines(output)


class _Lines:
    """One line per change."""

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
                self._output.data(
                    f"{job.id}  {job.type}  {job.state.value}  {job.percent}%  {words}".rstrip()
                )


class _Bars:
    """A bar per job, drawn by rich."""

    def __init__(self, output: Output) -> None:
        self._progress = _progress(output)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            name = f"{job.type} {job.id[:8]}"
            if job.id not in self._tasks:
                self._tasks[job.id] = self._progress.add_task(name, total=100, state="", words="")
            self._progress.update(
                self._tasks[job.id],
                completed=job.percent,
                state=job.state.value,
                words=one_line(job.message, limit=_MESSAGE_COLUMNS),
            )
            if job.state.is_final:
                self._progress.stop_task(self._tasks[job.id])


def _progress(output: Output) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft
    from rich.text import Text

    class Rate(ProgressColumn):
        """Percent per second, by what the last seconds brought."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if not speed else f"{speed:.1f} %/s")

    return Progress(
        # Names come from plugins: no markup.
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(markup=False),
        Rate(),
        TimeLeft(),
        TextColumn("{task.fields[state]}", markup=False),
        TextColumn("{task.fields[words]}", markup=False),
        console=Console(file=output.stdout),
        speed_estimate_period=20,
    )
