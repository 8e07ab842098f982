"""The two ways through a task take the same steps, and lists of methods have the number asked for."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.catalogue import plugins_of
from benchmarks.tool_use.schemas import tool_of
from benchmarks.tool_use.steps import STEPS, Step, arguments, program, step_of
from nekro.plugins.entries import MethodEntry
from nekro_agent.methods import Lane, SandboxMethodType


def test_a_step_takes_results_of_earlier_ones() -> None:
    step = Step(method="a.b.c", arguments={"x": "$2", "y": "$text1", "chat": "$chat", "z": "$2 not"})
    assert arguments(step, [1, [2]], chat_key="room") == {"x": [2], "y": "1", "chat": "room", "z": "$2 not"}
    assert program([step]) == "r1 = a.b.c(x=r2, y=str(r1), chat=_ck, z='$2 not')"
    compile(program(STEPS), "program", "exec")


@pytest.mark.parametrize("text", ["one.method {}", "a.b.c [1]", "a.b.c {x}"])
def test_a_step_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        step_of(text)
    assert step_of('a.b.c {"x": 1}') == Step(method="a.b.c", arguments={"x": 1})
    assert step_of("a.b.c") == Step(method="a.b.c", arguments={})


def test_a_method_is_a_tool_with_its_required_parameters() -> None:
    entry = MethodEntry(
        name="c", task="a.b.c", plugin_key="a.b", label="c", type=SandboxMethodType.TOOL, doc="Do.",
        signature="(x: str, y: list[int] = [], *, z: float, w: bool = True) -> str", lane=Lane.METHODS,
    )  # fmt: skip
    assert tool_of(entry)["function"] == {
        "name": "a__b__c",
        "description": "Do.",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "string"},
                "y": {"type": "array"},
                "z": {"type": "number"},
                "w": {"type": "boolean"},
            },
            "required": ["x", "z"],
        },
    }


def test_plugins_of_a_measurement_have_so_many_methods() -> None:
    plugins = plugins_of(17)
    names = [method.name for plugin in plugins for method in plugin.methods]
    assert len(names) == len(set(names)) == 17
