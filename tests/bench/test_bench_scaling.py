"""The scaling benchmark: its simulation against arithmetic, its page and a quick real run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.harness.machine import describe_machine
from benchmarks.scaling.measure import Costs, Figures, Throughput, Waiting
from benchmarks.scaling.model import capacity, simulate, system_for
from benchmarks.scaling.page import Taken, write_between_marks

COSTS = Costs(
    redis_commands_per_call=10,
    redis_cpu_seconds_per_call=0.00004,
    redis_net_bytes_per_call=5000,
    worker_cpu_seconds_per_call=0.0004,
    caller_cpu_seconds_per_call=0.0002,
    idle_worker_commands_per_second=5,
    idle_worker_redis_cpu_share=0.0002,
    idle_worker_cpu_share=0.005,
    run_cpu_seconds=0.02,
)
FIGURES = Figures(
    throughput=(
        Throughput(workers=1, in_flight=9, calls_per_second=1234.0, p50_seconds=0.01, p99_seconds=0.02),
    ),
    waiting=(
        Waiting(
            waiting=1000, wait_seconds=3.0, p50_extra_seconds=0.1, p99_extra_seconds=0.2,
            worker_bytes_per_call=40960, redis_bytes_per_call=1024,
        ),
    ),
    costs=COSTS,
)  # fmt: skip


def test_the_simulated_bottleneck_is_workers_when_few_and_redis_when_many() -> None:
    name, most = capacity(system_for(COSTS, workers=2)).first
    assert (name, most) == ("worker CPU", pytest.approx(5000))
    name, most = capacity(system_for(COSTS, workers=1000)).first
    assert (name, most) == ("Redis", pytest.approx(0.8 / 0.00004))
    assert capacity(system_for(COSTS, workers=1000, redises=4)).first[1] == pytest.approx(95_000)


def test_an_unloaded_call_takes_the_sum_of_its_parts() -> None:
    system = replace(system_for(COSTS, workers=4), idle_share=0.0)
    quiet = simulate(system, calls_per_second=1, calls=50)
    assert quiet.p50_seconds == pytest.approx(0.00064) == quiet.p99_seconds


@pytest.mark.extended
def test_a_higher_load_is_slower_and_a_seed_is_reproducible() -> None:
    system = system_for(COSTS, workers=4)
    half, full = (simulate(system, calls_per_second=rate, calls=2000) for rate in (5_000, 9_500))
    assert half.p99_seconds < full.p99_seconds and half.worker_use == pytest.approx(0.5)
    assert simulate(system, calls_per_second=5_000, calls=2000) == half


@pytest.mark.extended
def test_a_run_replaces_the_figures_of_the_page_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, page = tmp_path / "scale.json", tmp_path / "page.md"
    taken = Taken(
        figures=FIGURES, machine=describe_machine("Redis 7.2"), command="measure", date="2026-01-02"
    )
    kept.write_text(json.dumps(asdict(taken)))
    page.write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    assert scale.main(["--quick", "--from", str(kept), "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    for words in ("1,234", "Redis 7.2", "2026-01-02", "| 1,000 |", "40 KiB", "a million chats"):
        assert words in text
    assert capsys.readouterr().out.strip() in text


def test_a_page_without_markers_is_unchanged(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        write_between_marks(page, "x")
    assert page.read_text() == "no marks"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_quick_run_measures_real_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "scale.json"
    assert scale.main(["--quick", "--json", str(kept)]) == 0
    figures = json.loads(kept.read_text())["figures"]
    assert [one["workers"] for one in figures["throughput"]] == [1, 2]
    assert [one["waiting"] for one in figures["waiting"]] == [1, 10, 100]
    assert figures["costs"]["worker_cpu_seconds_per_call"] > 0
    assert "Simulated" in capsys.readouterr().out
