"""Bars of `nekro jobs watch`: rates and remaining times of seconds to hours."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nekro.cli.output import Output
from nekro.cli.views import job_bars
from nekro.cli.views.job_bars import Pace, job_view, rate_words, time_words


@pytest.mark.parametrize(
    ("per_second", "words"),
    [
        (None, ""),
        (12.34, "12.3 %/s"),
        (1.0, "1.0 %/s"),
        (0.5, "30.0 %/min"),
        (0.01, "36.0 %/h"),
        (0.0001, "0.4 %/h"),
    ],
)
def test_a_rate_is_shown_in_a_readable_unit(per_second: float | None, words: str) -> None:
    assert rate_words(per_second) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-:--"),
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1:00"),
        (185, "3:05"),
        (7200, "2:00:00"),
        (90_061, "25:01:01"),
    ],
)
def test_a_remaining_time_is_shown_as_on_a_clock(seconds: float | None, words: str) -> None:
    assert time_words(seconds) == words


def test_the_rate_is_that_of_the_steps_and_the_remaining_time_decreases() -> None:
    pace = Pace()
    assert (pace.per_second(), pace.seconds_left(now=0)) == (None, None)
    pace.see(10, now=0)
    pace.see(11, now=5)
    assert pace.per_second() is None, "one step may have begun just before it was seen"
    pace.see(20, now=50)
    assert pace.per_second() == pytest.approx(0.2)
    assert pace.seconds_left(now=50) == pytest.approx(400)
    assert pace.seconds_left(now=60) == pytest.approx(390)
    assert pace.seconds_left(now=9999) == 0


def test_only_recent_progress_counts_and_a_new_attempt_starts_over() -> None:
    pace = Pace()
    for percent in range(50):  # slow at first
        pace.see(percent, now=percent * 100)
    for step in range(10):  # then fast
        pace.see(50 + step, now=5000 + step)
    for step in range(30):
        pace.see(60 + step, now=5301 + step)
    assert (pace.per_second() or 0) > 0.1
    pace.see(3, now=6000)
    assert pace.per_second() is None


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1e6)), max_size=50))
def test_every_state_has_a_text(seen: list[tuple[int, float]]) -> None:
    pace, clock = Pace(), 0.0
    for percent, pause in seen:
        clock += pause
        pace.see(percent, now=clock)
        assert time_words(pace.seconds_left(now=clock)) and rate_words(pace.per_second()) is not None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_rate_remaining_time_and_the_jobs_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    now, terminal = [0.0], Terminal()
    monkeypatch.setattr(job_bars, "time", SimpleNamespace(monotonic=lambda: now[0]))
    job = SimpleNamespace(
        id="1a2b3c4d5e",
        type="download",
        percent=10,
        state="running",
        finished_at=None,
        message="0.8 of 2.0 GiB, 1.4 MiB/s",
    )
    with job_view(Output(stdout=terminal)) as view:
        view.show([job])
        now[0], job.percent = 600, 40
        view.show([job])
    shown = terminal.getvalue()
    for part in ("download 1a2b3c4d", "40%", "3.0 %/min", "20:00", "running", "0.8 of 2.0 GiB, 1.4 MiB/s"):
        assert part in shown
