"""Flame graphs: recorded from the real processes of a call, and the costs that are read from them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import profiles
from benchmarks.harness.contender import ROOT
from benchmarks.harness.flames import costs
from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.selection import describe

#: As py-spy writes it: callers above, `fg:x` and `fg:w` in samples.
FRAMES = (
    ("all", 0, 0, 100),
    ("main (nekro/cli/main.py:1)", 1, 0, 90),
    ("dumps (json/__init__.py:183)", 2, 0, 30),
    ("encode (nekro/wire/plain_json.py:5)", 2, 30, 40),
    ("main (nekro/cli/main.py:1)", 3, 30, 10),
    ("join (posixpath.py:71)", 3, 40, 10),
    ("loop (uvicorn/server.py:9)", 1, 90, 10),
)


@pytest.fixture
def flame_graph(tmp_path: Path) -> Path:
    boxes = "".join(
        f"<g><title>{name} ({width} samples, {width}.00%)</title>"
        f'<rect y="{36 + 16 * depth}" fg:x="{left}" fg:w="{width}"/></g>'
        for name, depth, left, width in FRAMES
    )
    path = tmp_path / "graph.svg"
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:fg="http://github.com/jonhoo/inferno">'
        f"<svg>{boxes}</svg></svg>"
    )
    return path


def test_costs_charge_libraries_to_the_function_of_the_product_that_calls_them(flame_graph: Path) -> None:
    found = {cost.function: (round(cost.own, 9), round(cost.total, 9)) for cost in costs(flame_graph)}
    # main: 20 of its own, 30 in json and 10 in its second frame; encode: 20 of its own and 10 in posixpath.
    assert found == {"main": (0.6, 0.9), "encode": (0.3, 0.4)}


def test_costs_are_sorted_and_name_the_place(flame_graph: Path) -> None:
    assert [cost.place for cost in costs(flame_graph)] == [
        "nekro/cli/main.py:1",
        "nekro/wire/plain_json.py:5",
    ]


def test_unknown_names_are_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        profiles.parse(["--only", "call,dance"])
    assert stopped.value.code == 2
    assert "there is no 'dance'; there are call, round, turn, run, command, start" in capsys.readouterr().err


@pytest.fixture
def tracing() -> None:
    """Skip where py-spy may not attach to a process of this user."""
    spy = Path(sys.executable).with_name("py-spy")
    if not spy.exists():
        pytest.skip("py-spy is not installed")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        try:
            dump = [str(spy), "dump", "--nonblocking", "--pid", str(waiting.pid)]
            done = subprocess.run(dump, capture_output=True, text=True)
        finally:
            waiting.kill()
    if "ermission" in done.stderr:
        pytest.skip(f"processes cannot be traced here: {done.stderr.strip()}")


@pytest.fixture
def sandboxes() -> None:
    """Skip where no sandbox can be made."""
    capability = asyncio.run(describe(SandboxSettings()))
    if not capability.ok:
        pytest.skip("no sandbox on this machine")


@pytest.mark.extended
@pytest.mark.usefixtures("tracing", "sandboxes")
def test_flame_graphs_of_a_call_name_functions_of_the_product(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = profiles.main(["--only", "call", "--seconds", "1", "--rate", "200", "--folder", str(tmp_path)])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["call-caller.svg", "call-worker.svg"]
    # Which functions a second of samples meets is chance, and few of them are taken on a busy machine.
    for graph in tmp_path.iterdir():
        found = costs(graph)
        assert found, graph
        assert f"{found[0].function} ({found[0].place})" in said.out
        for cost in found:
            file, name = cost.place.partition(":")[0], cost.function.rpartition(".")[2]
            assert name.startswith("<") or f"def {name}(" in (ROOT / file).read_text(), cost
