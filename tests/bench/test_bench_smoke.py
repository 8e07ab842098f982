"""The benchmark harness's arithmetic, report, command line and processes, without peers or Redis."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from waiting import WAIT_SECONDS

from benchmarks import streams
from benchmarks.harness.contender import (
    ROOT,
    TEXT,
    Contender,
    Setup,
    WindowClient,
    WrongAnswerError,
    check,
    probe,
)
from benchmarks.harness.figures import Figures, Spread, interval, percentile, quantile, ratios, spread
from benchmarks.harness.machine import describe_machine, library_versions
from benchmarks.harness.processes import Child, peak_bytes
from benchmarks.harness.report import Result, Run, as_data, as_text
from benchmarks.harness.turn import Plan
from benchmarks.peers import CONTENDERS, contender_named
from benchmarks.rpc import parse_options

FIGURES = Figures(
    p50_seconds=0.001,
    p95_seconds=0.002,
    p99_seconds=0.003,
    calls_per_second=1000,
    start_seconds=0.5,
    worker_peak_bytes=64 << 20,
    client_peak_bytes=None,
)
PLAN = Plan(sequential_calls=100, flood_calls=1000, in_flight=10, workers=1, limit_seconds=5)


def make_contender(name: str, *, ours: bool = False) -> Contender:
    def nothing(setup: Setup) -> WindowClient[int]:
        raise NotImplementedError

    return Contender(
        name=name,
        about=f"about {name}",
        modules=(),
        worker_commands=lambda setup: [],
        open_client=nothing,
        ours=ours,
    )


def make_run(results: list[Result]) -> Run:
    return Run(
        results=results,
        plan=PLAN,
        machine=describe_machine("Redis 6.2"),
        versions=library_versions(),
        command="python -m benchmarks.rpc",
    )


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (95, 95), (99, 99), (100, 100), (0.5, 1)])
def test_percentile_is_the_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], percent) == expected


def test_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_percentile_refuses_undefined_input(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        percentile(values, percent)


def test_spread_keeps_median_and_extremes() -> None:
    assert spread([3, 1, 10]) == Spread(median=3, low=1, high=10)
    assert spread([]) is None


def test_quantile_of_a_half_is_the_median() -> None:
    assert quantile([4, 1, 2, 3], 0.5) == 2.5
    assert quantile([4, 1, 2, 3], 0.75) == 3


def test_interval_of_a_quantile_shrinks_with_the_number_of_values() -> None:
    assert interval([1, 2], 0.5) is None
    # Six values contain the median with a probability of 31/32, five with less than 95 %.
    assert interval([3, 1, 2, 5, 4], 0.5) == (1, 5)
    assert interval(range(1, 7), 0.5) == (1, 6)
    assert interval(range(1, 8), 0.5) == (1, 7)
    assert interval(range(1, 10), 0.5) == (2, 8)
    assert interval(range(1, 101), 0.5) == (40, 61)
    low, high = interval(range(1, 2001), 0.75) or (0, 0)
    assert 1450 < low < 1500 < high < 1550


def test_ratios_are_taken_within_a_turn() -> None:
    # The machine was twice as slow in the second turn; pairwise, ours stays at half the peer's time.
    ours = [replace(FIGURES, p50_seconds=1.0), replace(FIGURES, p50_seconds=2.0)]
    peer = [replace(FIGURES, p50_seconds=2.0), replace(FIGURES, p50_seconds=4.0)]
    assert ratios(ours, peer, "p50_seconds") == Spread(median=0.5, low=0.5, high=0.5)


def test_ratios_leave_out_turns_that_lack_a_figure() -> None:
    assert ratios([FIGURES, None], [None, FIGURES], "p50_seconds") is None
    assert ratios([FIGURES], [FIGURES], "client_peak_bytes") is None
    assert ratios([None, FIGURES], [FIGURES, FIGURES], "calls_per_second") == Spread(median=1, low=1, high=1)


def test_report_gives_ratios_first_and_names_absent_and_failed_contenders() -> None:
    ours = Result(contender=make_contender("ours", ours=True), turns=[FIGURES, FIGURES])
    peer = Result(
        contender=make_contender("peer"),
        turns=[replace(FIGURES, p50_seconds=0.002), None],
        failures=["it broke"],
    )
    absent = Result(contender=make_contender("absent"), turns=[None, None], absent="not installed: x")
    text = as_text(make_run([ours, peer, absent]))
    ratio = next(line for line in text.splitlines() if line.startswith("/ peer"))
    assert "0.50 (0.50–0.50)" in ratio
    assert text.index("/ peer") < text.index("Figures:") < text.index("absent: not installed: x")
    assert "peer failed: it broke" in text
    assert "about peer" in text
    assert "Redis 6.2" in text


def test_report_without_ours_states_that() -> None:
    text = as_text(make_run([Result(contender=make_contender("peer"), turns=[FIGURES])]))
    assert text.startswith("No ratios")


def test_data_holds_every_turn_and_is_json() -> None:
    ours = Result(contender=make_contender("ours", ours=True), turns=[FIGURES, None])
    peer = Result(contender=make_contender("peer"), turns=[FIGURES, FIGURES])
    data = json.loads(json.dumps(as_data(make_run([ours, peer]))))
    assert data["contenders"]["ours"]["turns"] == [asdict(FIGURES), None]
    assert data["ratios"]["ours"]["peer"]["p50_seconds"] == {"median": 1, "low": 1, "high": 1}
    assert data["ratios"]["ours"]["peer"]["client_peak_bytes"] is None
    assert data["plan"]["in_flight"] == 10


def test_command_line_chooses_contenders_in_the_order_given() -> None:
    options = parse_options(["--only", "taskiq,raw-redis", "--turns", "3", "--calls", "7"])
    assert [contender.name for contender in options.contenders] == ["taskiq", "raw-redis"]
    assert (options.turns, options.plan.sequential_calls) == (3, 7)
    assert options.command == "python -m benchmarks.rpc --only taskiq,raw-redis --turns 3 --calls 7"


def test_quick_is_two_short_turns_and_explicit_numbers_win() -> None:
    quick, full = parse_options(["--quick"]), parse_options([])
    assert quick.turns == 2
    assert quick.plan.flood_calls < full.plan.flood_calls
    assert parse_options(["--quick", "--turns", "3"]).turns == 3


@pytest.mark.parametrize("argv", [["--only", "nobody"], ["--calls", "0"], ["--workers", "x"]])
def test_command_line_refuses_invalid_values(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_options(argv)
    assert stopped.value.code == 2
    assert argv[-1] in capsys.readouterr().err


def test_contender_names_are_unique_and_two_are_ours() -> None:
    names = [contender.name for contender in CONTENDERS]
    assert len(set(names)) == len(names)
    assert [contender_named(name) for name in names] == list(CONTENDERS)
    assert sum(contender.ours for contender in CONTENDERS) == 2


async def test_answers_are_checked() -> None:
    check(1, await probe(1, TEXT))
    with pytest.raises(WrongAnswerError, match="call 2"):
        check(2, await probe(1, TEXT))


class Echo(WindowClient[int]):
    """Answers at once and counts the calls in flight."""

    def __init__(self) -> None:
        self.under_way = 0
        self.most = 0

    def send(self, number: int) -> int:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return number

    def receive(self, ticket: int) -> object:
        self.under_way -= 1
        return {"number": ticket + 1, "text": TEXT}


def test_window_client_keeps_the_window_full_and_receives_every_answer() -> None:
    client = Echo()
    assert client.flood(50, in_flight=8) > 0
    assert (client.most, client.under_way) == (8, 0)


def test_latencies_leave_the_warm_up_out() -> None:
    assert len(Echo().sequential(5, warm_up=3)) == 5


def test_setup_reaches_a_child_without_the_settings_of_the_shell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEKRO_DATA_DIR", "/elsewhere")
    setup = Setup(
        redis_url="redis://127.0.0.1:1/0", http_port=1, directory=str(tmp_path), workers=1, in_flight=1
    )
    environment = setup.environment()
    assert "NEKRO_DATA_DIR" not in environment
    assert str(ROOT) in environment["PYTHONPATH"].split(os.pathsep)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Setup.from_environment() == setup


def test_child_is_measured_with_its_children_and_stopped_with_them(tmp_path: Path) -> None:
    waiting = "import sys; print(flush=True); sys.stdin.read()"
    program = (
        "import subprocess, sys\n"
        f"helper = subprocess.Popen([sys.executable, '-c', {waiting!r}], stdin=-1, stdout=-1)\n"
        "helper.stdout.readline()\n"
        "print(helper.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with Child([sys.executable, "-c", program], log=tmp_path / "log", piped=True) as child:
        helper = int(child.pipes()[1].readline())
        own, both = peak_bytes([helper]), peak_bytes([child.pid])
        assert own is not None
        assert both is not None
        assert both > own > 0
    assert child.ended() is not None
    assert peak_bytes([child.pid]) is None


def test_last_output_of_a_failed_child_is_kept(tmp_path: Path) -> None:
    with Child([sys.executable, "-c", "raise SystemExit('no such thing')"], log=tmp_path / "log") as child:
        child.process.wait(WAIT_SECONDS)
        assert child.ended() == 1
        assert child.last_words() == "no such thing"


@pytest.mark.extended
def test_streams_reach_every_reader_once(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--readers", "20", "--chats", "2", "--events", "5", "--per-second", "100"]
    assert streams.main([*options, "--json", str(figures)]) == 0
    found = json.loads(figures.read_text("utf-8"))
    assert (found["readers"], found["complete"]) == (20, 20)
