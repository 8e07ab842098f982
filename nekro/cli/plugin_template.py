"""Write the plugin and the test of `nekro plugins new`: a working example to start from."""

from __future__ import annotations

import keyword
import sys
from pathlib import Path
from typing import Final

from nekro_agent.errors import UsageError

__all__ = ["write_plugin"]

#: Names that plugin discovery or pytest reserves.
_TAKEN: Final = frozenset({"plugin", "conftest", "nekro_agent", "tests", "test"})


def write_plugin(name: str, directory: Path) -> list[Path]:
    """Write ``<name>.py`` and ``test_<name>.py``; returns their paths.

    Raises:
        UsageError: the name is not usable for a module, or one of the files exists.
    """
    _check(name)
    title = name.replace("_", " ").capitalize()
    files = {
        directory / f"{name}.py": _PLUGIN.format(name=name, title=title),
        directory / f"test_{name}.py": _TEST.format(name=name),
    }
    for path in files:
        if path.exists():
            raise UsageError(f"{path} exists; choose another name or folder")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, "utf-8")
    return list(files)


def _check(name: str) -> None:
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise UsageError(f"{name!r} is not a module name; use letters, digits and _, as in `new weather`")
    if name.startswith(("_", "test_")) or name in _TAKEN:
        raise UsageError(f"{name!r} is a reserved name, which plugin discovery skips; choose another name")
    if name in sys.stdlib_module_names:
        raise UsageError(
            f"{name!r} is a standard library module, which hides the plugin; choose another name"
        )


_PLUGIN: Final = '''"""{title}: describe the plugin here; models and people read it."""

from nekro_agent.api.plugin import ConfigBase, NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from pydantic import Field

plugin = NekroPlugin(
    name="{title}",
    module_name="{name}",
    description="Says what the plugin does.",
    version="0.1.0",
    author="you",
    url="",
)


@plugin.mount_config()
class Config(ConfigBase):
    """Settings of the plugin, kept in a YAML file that people may edit."""

    GREETING: str = Field(default="Hello", description="How a greeting begins.")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "greet_{name}", "Greets a person")
async def greet_{name}(_ctx: AgentCtx, name: str) -> str:
    """Greet a person; the model reads this text to learn how to call the method.

    Args:
        name: whom to greet.

    Returns:
        The greeting, with how many of them this chat has had.
    """
    config = plugin.get_config(Config)
    count = int(await plugin.store.get(chat_key=_ctx.chat_key, store_key="count") or 0) + 1
    await plugin.store.set(chat_key=_ctx.chat_key, store_key="count", value=str(count))
    return f"{{config.GREETING}}, {{name}}! (greeting {{count}})"
'''

_TEST: Final = '''"""Tests of the {name} plugin. `pytest` runs them; no worker or database is needed."""

import asyncio

from nekro_agent.testing import InMemoryRuntime

from {name} import plugin


def test_greetings_are_counted_per_chat(tmp_path):
    async def scene():
        async with InMemoryRuntime(plugin, data_dir=tmp_path) as world:
            first = await world.call("greet_{name}", "Ada", chat_key="group_1")
            second = await world.call("greet_{name}", name="Bob", chat_key="group_1")
            elsewhere = await world.call("greet_{name}", "Ada", chat_key="group_2")
        assert first.value == "Hello, Ada! (greeting 1)"
        assert second.value == "Hello, Bob! (greeting 2)"
        assert elsewhere.value == "Hello, Ada! (greeting 1)"

    asyncio.run(scene())
'''
