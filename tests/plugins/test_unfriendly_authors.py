"""Plugins with unusual Python: every kind of signature, decorators, threads, packages."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from loaded_plugins import unload_plugins
from plugin_world import CHAT, World

from nekro.plugins.loader import PluginStatus, load_plugins
from nekro_agent.errors import ArgumentError, ResultError
from nekro_agent.ports import MessageKind


async def test_signatures_of_every_kind_accept_the_passed_arguments(anywhere: World) -> None:
    place = {"city": "Kyoto", "at": (35.0, 135.8)}
    reading = (await anywhere.call("take_reading", place, "blue", limit=3, extra="x")).value
    # A dataclass, a typed dictionary and an enum are plain data when they arrive.
    assert as_plain(reading) == {
        "place": place,
        "colour": "blue",
        "taken": datetime(2026, 1, 2, 3, 4, 5),
    }
    assert anywhere.registry.find("take_reading").signature == (
        "(place: Place, colour: Colour = 'red', *, unit: Literal['C', 'F'] = 'C', "
        "notes: Optional[List[str]] = None, extra: Union[int, str, NoneType] = None, "
        "limit: int | None = None) -> Reading"
    )
    assert (await anywhere.call("search", query="q", filters={"a": [1]})).value == {"query": "q", "a": [1]}
    assert (await anywhere.call("anything", 1, two=2)).value == [CHAT, [1], {"two": 2}]
    with pytest.raises(ArgumentError, match=r"search\(\*, query: str.*too many positional arguments"):
        await anywhere.call("search", "q")
    with pytest.raises(ArgumentError, match="missing a required argument: 'place'"):
        await anywhere.call("take_reading")


async def test_a_mutated_default_stays_mutated(anywhere: World) -> None:
    first = len((await anywhere.call("add_to_basket", "a")).value)
    assert len((await anywhere.call("add_to_basket", "b")).value) == first + 1


async def test_a_docstring_may_be_long(anywhere: World) -> None:
    length = (await anywhere.call("long_doc")).value
    assert length > 70_000 and len(anywhere.registry.find("long_doc").doc or "") > 70_000


@pytest.mark.parametrize(("method", "argument"), [("count_up", 2), ("read_lines", "a")])
async def test_a_method_that_yields_is_refused_with_advice_to_return(
    anywhere: World, method: str, argument: Any
) -> None:
    with pytest.raises(ResultError, match=rf"{method}.*yield.*return"):
        await anywhere.call(method, argument)


async def test_decorators_that_keep_the_name_work(anywhere: World) -> None:
    assert (await anywhere.call("flaky", 2)).value == "True"
    assert (await anywhere.call("wrapped", 3)).value == 3
    assert anywhere.registry.find("flaky").signature == "(failures: int) -> str"


async def test_methods_of_objects_and_classes_and_generated_functions_are_called(anywhere: World) -> None:
    count = (await anywhere.call("remember", "a")).value
    assert (await anywhere.call("remember", word="b")).value == count + 1
    assert (await anywhere.call("to_feet", 1.5)).value == "1.5 feet"
    assert (await anywhere.call("convert_all", 2)).value == ["2 metres", "2 feet", "DONE"]


@pytest.mark.extended
async def test_threads_and_loops_of_a_plugin_reach_the_api(anywhere: World) -> None:
    assert (await anywhere.call("own_threads_where")).value == {"started": True, "debug": "no", "path": True}
    assert "a" in (await anywhere.call("write_by_thread", "a")).value
    assert (await anywhere.call("count_with_own_loop", "k")).value == 1
    assert (await anywhere.call("count_with_own_loop", "k")).value == 2
    assert await anywhere.texts(CHAT, MessageKind.ASSISTANT) == ["counted to 1", "counted to 2"]
    assert (await anywhere.call("count_from_pool", "k")).value == "7"


async def test_nested_packages_share_one_nested_configuration(anywhere: World) -> None:
    assert (await anywhere.call("item_price", "apple")).value == "1.0 EUR open"
    assert (await anywhere.call("same_config")).value == [True, "s3cret", "goods", "http://…"]
    await anywhere.call("stock_item", "vegetables", "leek", 2.5)
    assert (await anywhere.call("item_price", "leek")).value == "3.0 JPY open"
    file = anywhere.data_dir / "configs" / "Ada.shop.yaml"
    text = file.read_text("utf-8")
    assert "CURRENCY: JPY" in text and "leek: 2.5" in text and "INCLUDED: false" in text
    assert "TOKEN: s3cret" in text  # not the masked form, which would lose it
    file.write_text(text.replace("JPY", "EUR").replace("leek: 2.5", "leek: 4.0").replace("open", "CLOSED"))
    await anywhere.call("same_config")  # get_config reads the file
    assert (await anywhere.call("item_price", "leek")).value == "4.8 EUR closed"


def as_plain(value: Any) -> Any:
    """In memory the object itself is returned."""
    return value if isinstance(value, dict) else {**vars(value), "colour": value.colour.value}


BROKEN = {
    "missing_package.py": (
        "import aiohttp_of_no_installation.client\nplugin = None\n",
        "line 1: ModuleNotFoundError: No module named 'aiohttp_of_no_installation' — install it for the "
        f"workers: {sys.executable} -m pip install aiohttp_of_no_installation; or let the plugin call "
        "dynamic_import_pkg('aiohttp_of_no_installation')",
    ),
    "leaves_the_process.py": (
        "import sys\nsys.exit('no key')\nplugin = None\n",
        "line 2: SystemExit: no key",
    ),
    "beyond_the_package.py": (
        "from ..other import thing\nplugin = None\n",
        "ImportError: attempted relative import beyond top-level package",
    ),
    "no_required_default.py": (
        "from nekro_agent.api.plugin import ConfigBase, NekroPlugin\n"
        "plugin = NekroPlugin('n', 'no_required_default', '', '1', 'Ada', '')\n"
        "@plugin.mount_config()\nclass C(ConfigBase):\n    API_KEY: str\n",
        "InvalidValueError: configuration Ada.no_required_default.yaml: API_KEY: Field required",
    ),
    "method_of_no_function.py": (
        "from nekro_agent.api.plugin import NekroPlugin\n"
        "plugin = NekroPlugin('n', 'method_of_no_function', '', '1', 'Ada', '')\n"
        "import functools\n"
        "plugin.mount_sandbox_method('tool', 'x')(functools.partial(print, 1))\n",
        "TypeError: Ada.method_of_no_function: mount_sandbox_method needs a function, not functools.partial",
    ),
}


def test_a_plugin_that_fails_to_load_is_reported_with_reason_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEKRO_DATA_DIR", str(tmp_path / "data"))
    for name, (code, _) in BROKEN.items():
        (tmp_path / name).write_text(code)
    loaded = load_plugins([tmp_path], shipped=False, entry_points=False)
    records = {Path(record.path).name: record for record in loaded.records}
    assert {record.status for record in records.values()} == {PluginStatus.FAILED}
    for name, (_, reason) in BROKEN.items():
        assert reason in (records[name].error or ""), records[name].error
    unload_plugins(loaded)
