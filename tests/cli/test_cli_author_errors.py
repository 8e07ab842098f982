"""What an author of a plugin sees when a method raises: the places in the plugin's own source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nekro_shell import Shell, open_shell

pytestmark = pytest.mark.usefixtures("up")

PLUGIN = '''
import json
import types

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Probe", module_name="probe", description="For tests.", version="1", author="t", url=""
)


class OddError(Exception):
    """Cannot be pickled, so Celery replaces it."""

    def __init__(self, words):
        super().__init__(words)
        self.lock = __import__("threading").Lock()


def parse(text):
    return json.loads(text)  # the place in question


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "read")
async def read(_ctx: AgentCtx, text: str) -> object:
    """Parse."""
    return parse(text)


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "odd")
async def odd(_ctx: AgentCtx) -> str:
    """Raise an exception of the plugin's own."""
    raise OddError("odd")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "leak")
async def leak(_ctx: AgentCtx) -> str:
    """Raise beside a secret."""
    raise ValueError("why")  # postgresql://ada:hunter22@db/x


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "store_nothing")
async def store_nothing(_ctx: AgentCtx) -> None:
    """Raise inside the SDK."""
    await plugin.store.set(chat_key="c", store_key="", value="x")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "deep")
async def deep(_ctx: AgentCtx, depth: int) -> None:
    """Raise far down."""
    def down(left):
        if not left:
            raise ValueError("bottom")
        down(left - 1)
    down(depth)
'''

PACKAGE = '''
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

from .work import fail

plugin = NekroPlugin(
    name="Pack", module_name="pack", description="For tests.", version="1", author="t", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "pack_fail")
async def pack_fail(_ctx: AgentCtx) -> None:
    """Raise in another module of the package."""
    fail()
'''


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with open_shell({"probe.py": PLUGIN}) as shell:
        package = shell.directory / "plugins" / "pack"
        package.mkdir()
        (package / "__init__.py").write_text(PACKAGE, "utf-8")
        (package / "work.py").write_text("def fail():\n    raise KeyError('gone')\n", "utf-8")
        yield shell


def line_of(text: str) -> int:
    """Number of the line of the plugin that contains a text."""
    return next(number for number, line in enumerate(PLUGIN.splitlines(), 1) if text in line)


@pytest.mark.extended
def test_the_last_place_in_the_plugin_is_always_shown(shell: Shell) -> None:
    done = shell.inside("call", "read", "--args", '["{"]')
    place = f"probe.py:{line_of('the place in question')} in parse: "
    assert done.code == 6
    first, last = done.err.splitlines()[-2:]
    assert first == place + "return json.loads(text)  # the place in question"
    assert last.startswith("error: JSONDecodeError: ")


def test_debug_shows_every_place_in_the_plugin_and_none_of_others(shell: Shell) -> None:
    done = shell.inside("--debug", "call", "read", "--args", '["{"]', "--json")
    frames = done.value["error"]["frames"]
    assert [(frame["file"], frame["function"], frame["line"]) for frame in frames] == [
        ("probe.py", "read", line_of("return parse(text)")),
        ("probe.py", "parse", line_of("the place in question")),
    ]
    for frame in frames:
        assert f"{frame['file']}:{frame['line']} in {frame['function']}: {frame['code']}" in done.err


def test_json_has_the_last_place_as_fields(shell: Shell) -> None:
    error = shell.inside("call", "odd", "--json").value["error"]
    assert (error["type"], error["message"]) == ("OddError", "odd")
    frame = {"file": "probe.py", "line": line_of('raise OddError("odd")'), "function": "odd"}
    assert error["frames"] == [frame | {"code": 'raise OddError("odd")'}]


def test_a_place_has_no_secret_and_no_path_of_the_host(shell: Shell) -> None:
    done = shell.inside("call", "leak", "--json")
    (frame,) = done.value["error"]["frames"]
    assert frame["code"] == 'raise ValueError("why")  # postgresql://ada:[secret]@db/x'
    assert "hunter22" not in done.out + done.err
    assert str(shell.directory) not in done.out


def test_an_error_inside_the_sdk_is_placed_in_the_plugin(shell: Shell) -> None:
    error = shell.inside("--debug", "call", "store_nothing", "--json").value["error"]
    assert [frame["function"] for frame in error["frames"]] == ["store_nothing"]
    assert "plugin.store.set" in error["frames"][0]["code"]


def test_a_place_in_a_package_names_the_module(shell: Shell) -> None:
    error = shell.inside("--debug", "call", "pack_fail", "--json").value["error"]
    places = [(frame["file"], frame["function"]) for frame in error["frames"]]
    assert places == [("pack/__init__.py", "pack_fail"), ("pack/work.py", "fail")]


def test_the_number_of_places_is_bounded(shell: Shell) -> None:
    frames = shell.inside("--debug", "call", "deep", "--args", "[200]", "--json").value["error"]["frames"]
    assert len(frames) == 20
    assert frames[-1]["code"] == 'raise ValueError("bottom")'


def test_an_error_without_a_place_in_a_plugin_has_none(shell: Shell) -> None:
    assert "frames" not in shell.inside("call", "deep", "--json").value["error"]
