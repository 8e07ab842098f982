"""Plugin configuration and identity."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from nekro_agent import runtime
from nekro_agent.api.plugin import (
    AsyncTaskHandle,
    CmdCtl,
    CommandExecutionContext,
    CommandResponse,
    SandboxMethodType,
    task,
)
from nekro_agent.config import ConfigBase, ExtraField
from nekro_agent.errors import InvalidValueError
from nekro_agent.files.private_files import write_private
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.testing import InMemoryRuntime


@pytest.fixture(autouse=True)
def data_root(tmp_path: Path) -> Any:
    runtime.prepare(data_dir=tmp_path)
    yield tmp_path
    runtime.prepare(data_dir=None)


def mounted(plugin: NekroPlugin) -> type[ConfigBase]:
    @plugin.mount_config()
    class Config(ConfigBase):
        NAME: str = Field("名", title="Title", json_schema_extra=ExtraField(placeholder="p").model_dump())
        LIMIT: int = 3
        TAGS: dict[str, list[str]] = Field(default_factory=dict)

    return Config


async def test_the_file_is_created_with_the_defaults_when_a_runtime_starts_the_plugin(
    plugin: NekroPlugin, tmp_path: Path
) -> None:
    cls = mounted(plugin)
    assert plugin.get_config(cls) is plugin.get_config() and cls.load_config() == plugin.get_config()
    assert list(tmp_path.iterdir()) == []
    async with InMemoryRuntime(plugin, data_dir=tmp_path):
        pass
    file = tmp_path / "configs" / "Ada.sample.yaml"
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    assert yaml.safe_load(file.read_text("utf-8")) == {"NAME": "名", "LIMIT": 3, "TAGS": {}}
    assert "名" in file.read_text("utf-8")
    assert (cls.get_field_title("NAME"), cls.get_field_title("LIMIT")) == ("Title", "LIMIT")
    assert (cls.get_field_placeholder("NAME"), cls.get_field_placeholder("LIMIT")) == ("p", "")


async def test_missing_fields_are_added_and_unknown_ones_ignored(plugin: NekroPlugin, tmp_path: Path) -> None:
    file = tmp_path / "configs" / "Ada.sample.yaml"
    file.parent.mkdir()
    file.write_bytes("\ufeffLIMIT: 7\nOLD: x\n".encode())
    mounted(plugin)
    config: Any = plugin.get_config()
    assert (config.LIMIT, config.NAME) == (7, "名")
    assert yaml.safe_load(file.read_text("utf-8-sig")) == {"LIMIT": 7, "OLD": "x"}
    async with InMemoryRuntime(plugin, data_dir=tmp_path):
        pass
    assert yaml.safe_load(file.read_text("utf-8"))["TAGS"] == {}
    assert config is plugin.get_config()


def test_saving_another_instance_keeps_the_one_object(plugin: NekroPlugin, tmp_path: Path) -> None:
    cls = mounted(plugin)
    config: Any = plugin.get_config(cls)
    plugin.save_config(cls(LIMIT=9))
    assert config.LIMIT == 9 and plugin.get_config() is config
    with pytest.raises(TypeError, match="save_config needs an instance of Config, not ConfigBase"):
        plugin.save_config(ConfigBase())
    assert not [path for path in (tmp_path / "configs").iterdir() if path.name.startswith(".")]


def test_two_processes_see_each_others_changes(plugin: NekroPlugin) -> None:
    cls = mounted(plugin)
    other = NekroPlugin("sample", "sample", "", "1", "Ada", "")
    other_config: Any = mounted(other) and other.get_config()
    mine: Any = plugin.get_config(cls)
    mine.LIMIT = 8
    plugin.save_config(mine)
    assert other.get_config() is other_config and other_config.LIMIT == 8
    mine.LIMIT = 99  # not saved: invisible to others and not overwritten
    assert other.get_config() is other_config and other_config.LIMIT == 8
    assert plugin.get_config() is mine and mine.LIMIT == 99


async def test_a_test_runtime_uses_its_own_configuration_and_leaves_the_operators_unchanged(
    plugin: NekroPlugin, tmp_path: Path
) -> None:
    operators = tmp_path / "configs" / "Ada.sample.yaml"
    operators.parent.mkdir()
    operators.write_text("LIMIT: 7\n")
    cls = mounted(plugin)
    config: Any = plugin.get_config(cls)  # as a plugin's module does, once
    async with InMemoryRuntime(plugin, data_dir=tmp_path / "test"):
        assert config.LIMIT == 3
        config.LIMIT = 99
        plugin.save_config(config)
        assert cls.load_config() == config == cls(LIMIT=99)
        (plugin.get_plugin_data_dir() / "note").write_text("x")
    assert operators.read_text() == "LIMIT: 7\n"
    assert config.LIMIT == 7 and plugin.get_config() is config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs", "test"]
    async with InMemoryRuntime(plugin, data_dir=tmp_path / "test"):
        assert config.LIMIT == 99


async def test_a_test_runtime_without_a_data_dir_leaves_nothing(plugin: NekroPlugin, tmp_path: Path) -> None:
    cls = mounted(plugin)
    async with InMemoryRuntime(plugin) as world:
        plugin.save_config(cls(LIMIT=5))
        root = world.runtime.data_dir
        assert (root / "configs" / "Ada.sample.yaml").is_file()
    assert not root.exists() and list(tmp_path.iterdir()) == []


async def test_a_configuration_that_cannot_be_written_does_not_stop_a_start(
    plugin: NekroPlugin, tmp_path: Path
) -> None:
    mounted(plugin)
    (tmp_path / "configs").write_text("no directory")
    async with InMemoryRuntime(plugin, data_dir=tmp_path) as world:
        assert world.failures == [] and plugin.get_config() == plugin.get_config()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("LIMIT: [", "is not valid YAML"),
        ("- a", "must be a mapping, not list"),
        ("LIMIT: many", "LIMIT: Input"),
    ],
)
def test_an_invalid_file_at_mount_is_an_error_that_names_it(
    plugin: NekroPlugin, tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "configs" / "Ada.sample.yaml"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(InvalidValueError, match=rf"Ada\.sample\.yaml.*{reason}"):
        mounted(plugin)


def test_without_a_mounted_class_the_error_explains_how_to_mount_one(plugin: NekroPlugin) -> None:
    with pytest.raises(InvalidValueError, match="mount_config"):
        plugin.get_config()
    with pytest.raises(TypeError, match="none is mounted"):
        plugin.save_config(ConfigBase())
    with pytest.raises(InvalidValueError, match="ConfigBase has no file"):
        ConfigBase().dump_config()


@pytest.mark.parametrize("bad", ["", " ", "1a", "a-b", "a.b", "ä", "a b", None, 3])
def test_module_and_author_names_are_identifiers(bad: Any) -> None:
    for field in ("module_name", "author"):
        values = {"name": "n", "module_name": "m", "description": "", "version": "1", "author": "a"}
        with pytest.raises(InvalidValueError, match=f"{field}="):
            NekroPlugin(**{**values, field: bad})


def test_directories_docs_and_collection_names_follow_the_plugin_key(
    plugin: NekroPlugin, tmp_path: Path
) -> None:
    assert plugin.get_plugin_data_dir() == plugin.get_plugin_path() == tmp_path / "plugins/Ada.sample"
    assert plugin.get_plugin_data_dir().is_dir()
    assert plugin.get_vector_collection_name("x") == "Ada.sample-x"
    assert repr(plugin) == "<NekroPlugin Ada.sample 1>"
    own = NekroPlugin("n", "own", "", "1", "Ada", "")
    assert own.get_docs() == "Plugin configuration and identity."


async def test_a_module_level_object_has_what_another_process_saved_at_the_next_call(
    plugin: NekroPlugin, tmp_path: Path
) -> None:
    cls: Any = mounted(plugin)
    kept: Any = plugin.get_config(cls)  # as `config = plugin.get_config(Config)` at the top of a module
    seen: list[int] = []

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "limit", "")
    async def limit(_ctx: AgentCtx) -> int:
        """Read it."""
        return int(kept.LIMIT)

    @plugin.mount_prompt_inject_method("limit")
    async def shown(_ctx: AgentCtx) -> str:
        return str(kept.LIMIT)

    @plugin.mount_command(name="limit", description="")
    async def command(context: CommandExecutionContext) -> CommandResponse:
        return CmdCtl.success(str(kept.LIMIT))

    @plugin.mount_async_task("limit")
    async def job(handle: AsyncTaskHandle) -> None:
        seen.append(kept.LIMIT)

    async with InMemoryRuntime(plugin, data_dir=tmp_path) as world:
        for number in range(10, 60):  # in quick succession, so that times and sizes of the file repeat
            save_elsewhere(tmp_path, number)
            assert (await world.call("limit")).value == number
        save_elsewhere(tmp_path, 71)
        assert await world.host.inject(plugin, world.context()) == "71"
        save_elsewhere(tmp_path, 72)
        assert "72" in [answer.message async for answer in world.command("/limit")]
        save_elsewhere(tmp_path, 73)
        await task.start("limit", "one", "chat", plugin)
        await world.jobs.settled()
        assert seen == [73] and plugin.get_config() is kept


def save_elsewhere(root: Path, limit: int) -> None:
    """Write the file as another process does."""
    file = root / "configs" / "Ada.sample.yaml"
    write_private(file, yaml.safe_dump({"NAME": "n", "LIMIT": limit, "TAGS": {}}))


async def test_unsaved_changes_stay_until_another_process_saves(plugin: NekroPlugin, tmp_path: Path) -> None:
    cls: Any = mounted(plugin)
    async with InMemoryRuntime(plugin, data_dir=tmp_path):
        config: Any = plugin.get_config(cls)
        plugin.save_config(config)
        config.LIMIT = 8
        plugin.refresh_config()
        assert config.LIMIT == 8
        save_elsewhere(tmp_path, 9)
        plugin.refresh_config()
        assert config.LIMIT == 9
        (tmp_path / "configs" / "Ada.sample.yaml").write_text("LIMIT: [")
        plugin.refresh_config()
        assert config.LIMIT == 9
