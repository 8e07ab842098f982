"""Finding and importing plugins."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workers.plugins.discovery import SourceKind, discover
from workers.plugins.loader import LoadedPlugins, PluginStatus, load_plugins, unload_plugins

PLUGIN = '''
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
plugin = NekroPlugin("n", "{name}", "d", "2.0", "{author}", "u")

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "label")
async def {name}_method(ctx):
    """Doc."""
    return "{name}"
'''

Load = Callable[..., LoadedPlugins]


def source(name: str, author: str = "Ada", extra: str = "") -> str:
    return PLUGIN.format(name=name, author=author) + extra


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    results: list[LoadedPlugins] = []

    def run(*dirs: Path, **options: Any) -> LoadedPlugins:
        options = {"shipped": False, "entry_points": False, "data_dir": tmp_path / "data", **options}
        results.append(load_plugins(dirs or (tmp_path / "plugins",), **options))
        return results[-1]

    (tmp_path / "plugins").mkdir()
    yield run
    for result in results:
        unload_plugins(result)


@pytest.fixture
def folder(tmp_path: Path, load: Load) -> Path:
    return tmp_path / "plugins"


def statuses(loaded: LoadedPlugins) -> dict[str, PluginStatus]:
    return {record.key: record.status for record in loaded.records}


def test_a_named_path_may_be_a_file_a_package_or_a_repository(load: Load, folder: Path) -> None:
    (folder / "one.py").write_text(source("one"))
    (folder / "two").mkdir()
    (folder / "two" / "__init__.py").write_text(source("two"))
    (folder / "three-repo").mkdir()
    (folder / "three-repo" / "plugin.py").write_text(source("three"))
    for path, kind in [("one.py", "file"), ("two", "package"), ("three-repo", "root_file")]:
        (found,) = discover(folder / path)
        assert found.kind is SourceKind(kind)
    loaded = load(folder / "one.py", folder / "two", folder / "three-repo")
    assert statuses(loaded) == {f"Ada.{n}": PluginStatus.OK for n in ("one", "two", "three")}
    assert [record.version for record in loaded.records] == ["2.0"] * 3


def test_files_without_a_plugin_are_not_imported(load: Load, folder: Path) -> None:
    (folder / "helper.py").write_text("raise RuntimeError('imported')")
    (folder / "_draft.py").write_text(source("draft"))
    (folder / "tests").mkdir()
    (folder / "tests" / "case.py").write_text(source("case"))
    (folder / "notes.txt").write_text("plugin = 1")
    assert load().records == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("plugin = (", "bad.py, line 1: SyntaxError"),
        (
            "import no_such_package\nplugin = 1",
            "install it for the workers, or let",
        ),
        ("plugin = 42", "`plugin` is int; it must be the NekroPlugin instance"),
        ("x = 1\nraise ValueError('broken on purpose')\nplugin = 1", "bad.py, line 2: ValueError: broken on"),
        ("import sys\nsys.exit('bye')\nplugin = 1", "SystemExit: bye"),
        (source("bad").replace('"bad", "d"', '"1bad", "d"'), "module_name='1bad' must be letters"),
        ("plugin = None\ndef f(:\n  pass", "bad.py, line 2: SyntaxError"),
        ("plugin = 1\0", "bad.py: SyntaxError: source code string cannot contain null bytes"),
        (
            source("bad") + "\nimport asyncio; plugin.store.get(store_key='k').send(None)",
            "not at import time",
        ),
        (source("bad") + "\n@plugin.mount_config()\nclass C: pass", "derives from ConfigBase"),
    ],
)
def test_a_plugin_that_fails_is_reported_and_the_others_load(
    load: Load, folder: Path, text: str, error: str
) -> None:
    (folder / "bad.py").write_text(text)
    (folder / "good.py").write_text(source("good"))
    loaded = load()
    assert statuses(loaded) == {"bad": PluginStatus.FAILED, "Ada.good": PluginStatus.OK}
    assert error in (loaded.records[0].error or "")
    assert loaded.records[0].path.endswith("bad.py") and "Traceback" not in (loaded.records[0].error or "")
    assert not [name for name in sys.modules if name.startswith("nekro_plugins.bad")]


def test_a_duplicate_key_is_refused_and_both_paths_named(load: Load, folder: Path) -> None:
    (folder / "a_first.py").write_text(source("same"))
    (folder / "b_second.py").write_text(source("same"))
    loaded = load()
    assert [record.status for record in loaded.records] == [PluginStatus.OK, PluginStatus.FAILED]
    assert "a_first.py has it" in (loaded.records[1].error or "")
    assert "b_second.py is refused" in (loaded.records[1].error or "")
    assert len(loaded.plugins) == 1


def test_files_of_the_same_name_in_two_folders_are_two_plugins(load: Load, folder: Path) -> None:
    for author in ("Ada", "Bob"):
        (folder / author).mkdir()
        (folder / author / "tool.py").write_text(source("tool", author))
    assert set(statuses(load(folder / "Ada", folder / "Bob"))) == {"Ada.tool", "Bob.tool"}


def test_a_disabled_plugin_loads_and_is_listed(load: Load, folder: Path) -> None:
    (folder / "one.py").write_text(source("one"))
    loaded = load(disabled=["Ada.one", "Ada.none"])
    assert statuses(loaded) == {"Ada.one": PluginStatus.DISABLED}


def test_a_missing_folder_is_reported(load: Load, tmp_path: Path) -> None:
    (record,) = load(tmp_path / "nowhere").records
    assert record.status is PluginStatus.FAILED and "does not exist (NEKRO_PLUGINS__DIRS)" in (
        record.error or ""
    )


def test_a_failed_init_is_listed(load: Load, folder: Path) -> None:
    (folder / "one.py").write_text(source("one"))
    loaded = load()
    loaded.add_error("Ada.one", "init: ValueError: no")
    assert loaded.records[0].status is PluginStatus.FAILED
    assert loaded.records[0].error == "init: ValueError: no"
    assert len(loaded.plugins) == 1


def test_installed_distributions_offer_plugins(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = folder.parent / "site"
    (site / "offered-1.0.dist-info").mkdir(parents=True)
    (site / "offered_plugin.py").write_text(source("offered"))
    (site / "offered-1.0.dist-info" / "METADATA").write_text("Name: offered\nVersion: 1.0\n")
    (site / "offered-1.0.dist-info" / "entry_points.txt").write_text(
        "[nekro_agent.plugins]\nmodule = offered_plugin\nbroken = offered_nothing\n"
        "object = offered_plugin:plugin\n"
    )
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    loaded = load(entry_points=True)
    by_error = [(record.key, record.status, record.error) for record in loaded.records]
    assert ("Ada.offered", PluginStatus.OK, None) in by_error
    assert any(key == "broken" and "No module named 'offered_nothing'" in str(e) for key, _, e in by_error)
    assert sum("is taken" in str(error) for _, _, error in by_error) == 1


def test_the_data_directory_at_import_is_the_given_one(
    load: Load, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEKRO_DATA_DIR", raising=False)
    extra = "\n(plugin.get_plugin_data_dir() / 'made').touch()\n"
    (folder / "one.py").write_text(source("one", extra=extra))
    assert statuses(load()) == {"Ada.one": PluginStatus.OK}
    assert (tmp_path / "data/plugins/Ada.one/made").is_file()


def test_placeholders_are_recorded_for_each_plugin_that_uses_them(load: Load, folder: Path) -> None:
    use = "\nfrom nekro_agent.services.brand_new import Thing\n"
    guarded = "\ntry:\n    " + use.strip() + "\nexcept ImportError:\n    Thing = 'own'\n"
    later = "\nasync def later():\n    from nekro_agent.x import y\n"
    (folder / "one.py").write_text(source("one", extra=use))
    (folder / "two.py").write_text(source("two", extra=use))
    (folder / "three.py").write_text(source("three", extra=guarded))
    (folder / "four.py").write_text(source("four", extra=later))
    loaded = load()
    assert statuses(loaded) == {
        "Ada.one": PluginStatus.DEGRADED,
        "Ada.two": PluginStatus.DEGRADED,
        "Ada.three": PluginStatus.OK,
        "Ada.four": PluginStatus.OK,
    }
    assert [record.placeholders for record in loaded.records if record.placeholders] == [
        ["nekro_agent.services.brand_new.Thing"]
    ] * 2


def test_the_sdks_own_modules_never_get_placeholders(load: Load) -> None:
    load()
    with pytest.raises(ImportError):
        exec("from nekro_agent.api.core import no_such_name", {"__name__": "nekro_agent.something"})
    with pytest.raises(ModuleNotFoundError):
        exec("import nekro_agent.no_such_module", {"__name__": "workers.something"})
    from nekro_agent.api import core

    assert not hasattr(core, "no_such_name")
