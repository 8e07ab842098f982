"""The scaling benchmark: its simulation against arithmetic, its page and a quick real run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale
from benchmarks.harness.machine import describe_machine
from benchmarks.scaling.limits import MIX, limits
from benchmarks.scaling.measure import Costs, Figures, Throughput, Waiting
from benchmarks.scaling.model import broker_shares, capacity, simulate, system_for
from benchmarks.scaling.page import Taken, write_between_marks
from benchmarks.scaling.streams import StreamCosts
from benchmarks.scaling.turn_model import Cell, Outage, cell_for, simulate_turns
from benchmarks.scaling.turns import FIT, Mix, Spent, Turns, part_costs

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
    broker_cpu_seconds_per_call=0.00003,
    results_cpu_seconds_per_call=0.00001,
)


def spent(**given: float) -> Spent:
    counts = ("commits", "wal_bytes", "statements", "redis_commands", "announcements")
    names = ("gateway", "rounds", "methods", "redis", "postgresql")
    return Spent(
        cpu_seconds={name: given.get(name, 0.001) for name in names},
        **{name: given.get(name, 1.0) for name in counts},
    )


WORDS = spent(gateway=0.02, rounds=0.02, postgresql=0.01, commits=5, statements=50, redis_commands=30)
ONE = WORDS.plus(spent(rounds=0.05, postgresql=0.01, commits=6, statements=40, redis_commands=40), 1)
TURNS = Turns(
    fit=(
        WORDS,
        ONE,
        ONE.plus(spent(commits=0, statements=0, redis_commands=20), FIT[2].tools),
        ONE.plus(spent(postgresql=0.003, commits=3, statements=10, redis_commands=20), FIT[3].notes),
    ),
    check=None,
    idle=spent(),
    idle_bytes={name: 100 << 20 for name in ("gateway", "rounds", "methods", "redis", "postgresql")},
    sync_seconds=0.002,
    load_1m=1.0,
)
STREAMS = StreamCosts(
    opening_cpu_seconds=0.003, bytes_per_stream=65536, event_cpu_seconds=0.0006, delivery_cpu_seconds=0.00008,
    foreign_cpu_seconds=0.000007, foreign_redis_cpu_seconds=0.000004,
)  # fmt: skip
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
    turns=TURNS,
    streams=STREAMS,
)  # fmt: skip


def test_the_simulated_bottleneck_is_workers_when_few_and_redis_when_many() -> None:
    name, most = capacity(system_for(COSTS, workers=2)).first
    assert (name, most) == ("worker CPU", pytest.approx(5000))
    name, most = capacity(system_for(COSTS, workers=1000)).first
    assert (name, most) == ("Redis", pytest.approx(0.8 / 0.00004))
    assert capacity(system_for(COSTS, workers=1000, redises=4)).first[1] == pytest.approx(
        0.95 / 0.00004 / max(broker_shares(4))
    )


def test_an_unloaded_call_takes_the_sum_of_its_parts() -> None:
    system = replace(system_for(COSTS, workers=4), idle_share=0.0)
    quiet = simulate(system, calls_per_second=1, calls=50)
    assert quiet.p50_seconds == pytest.approx(0.00064) == quiet.p99_seconds


def test_the_parts_of_turns_predict_another_turn() -> None:
    costs = part_costs(TURNS.fit)
    assert costs.note.commits == pytest.approx(3) and costs.tool.redis_commands == pytest.approx(20)
    found = costs.of(Mix(code_rounds=2, tools=3, notes=4))
    assert found.commits == pytest.approx(5 + 2 * 6 + 2 * 4 * 3)
    assert found.cpu_seconds["postgresql"] == pytest.approx(0.01 + 2 * (0.01 + 3 * 0.001 + 4 * 0.003))


def test_every_chat_has_a_broker_and_the_busiest_has_more_than_its_share() -> None:
    shares = broker_shares(4)
    assert sum(shares) == pytest.approx(1) and 0.25 < max(shares) < 0.4
    assert broker_shares(1) == (1.0,)


def test_a_fleet_of_many_workers_needs_a_pooler_first() -> None:
    found = limits(COSTS, TURNS, STREAMS, workers=1000)
    assert "max_connections" in found[0].part and found[0].turns_per_second == 0
    assert all(one.cured_turns_per_second > one.turns_per_second for one in found)
    assert [one.turns_per_second for one in found] == sorted(one.turns_per_second for one in found)


def cell(**given: Any) -> Cell:
    fields = {
        "turns_per_second": 20.0, "broker_shares": (1.0,), "idle_share": 0.0, "database_cores": 8,
        "connections": 50, "sync_seconds": 0.005, **given,
    }  # fmt: skip
    return cell_for(part_costs(TURNS.fit), MIX, run_seconds=0.02, full=0.6, **fields)


def test_commits_that_wait_share_a_sync() -> None:
    quiet = simulate_turns(cell(turns_per_second=0.1), turns=40)
    assert quiet.commits_per_sync == pytest.approx(1, abs=0.1)
    assert quiet.commit_p99_seconds <= 0.010001
    busy = simulate_turns(cell(turns_per_second=60.0), turns=300)
    assert busy.commits_per_sync > 2 and busy.commit_p99_seconds <= 0.010001


def test_a_pool_that_is_too_small_makes_turns_wait() -> None:
    wide, narrow = (simulate_turns(cell(connections=number), turns=300) for number in (50, 2))
    assert wide.connection_p99_seconds == 0 < narrow.connection_p99_seconds
    assert narrow.connections_used == 2 and narrow.p99_seconds > wide.p99_seconds


def test_an_outage_of_a_broker_refuses_calls_and_delays_turns_of_its_chats_only() -> None:
    outage = Outage(begin_seconds=8.0, seconds=6.0)
    alone, half = (
        simulate_turns(cell(broker_shares=shares, outage=outage), turns=800)
        for shares in ((1.0,), (0.5, 0.5))
    )
    assert alone.calls_refused > half.calls_refused > 0
    assert (
        alone.turns_delayed == pytest.approx(120, rel=0.3) and half.turns_delayed < 0.7 * alone.turns_delayed
    )
    assert alone.recovered_seconds is not None and 0 < alone.recovered_seconds < 15
    assert simulate_turns(cell(outage=outage), turns=800) == alone


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
    for words in (
        "max_connections",
        "predicted",
        "1,234",
        "Redis 7.2",
        "2026-01-02",
        "| 1,000 |",
        "40 KiB",
        "a million chats",
    ):
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
    costs = figures["costs"]
    assert costs["worker_cpu_seconds_per_call"] > 0 and costs["results_cpu_seconds_per_call"] > 0
    assert figures["streams"]["bytes_per_stream"] > 0
    words, check = figures["turns"]["fit"][0], figures["turns"]["check"]
    assert 1 < words["commits"] < check["commits"] and words["statements"] > words["commits"]
    assert "Simulated" in capsys.readouterr().out
