"""Policies of plugins' data directories, chosen by a look at their code."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_config.settings import FileSettings, Settings
from nekro.plugins.configuration import plugin_dirs
from nekro.plugins.data_dirs import DirectoryPolicy, PluginDirs, choose_policy
from nekro.plugins.loader import load_plugins
from nekro.plugins.registry import LoadedRegistry
from nekro_agent.errors import SettingsError
from nekro_agent.plugin import NekroPlugin

AUTHORED = Path(__file__).parent / "authored"
ROOT = "root = plugin.get_plugin_data_dir()\n"


def policy(*texts: str) -> str:
    choice = choose_policy([(f"{number}.py", text) for number, text in enumerate(texts)])
    return f"{choice.policy}: {choice.reason}"


def test_code_that_does_not_name_its_directory_needs_nothing() -> None:
    assert policy("import sqlite3\nopen('x', 'a')") == "unused: its code does not name the directory"
    assert policy("not python") == "unused: its code does not name the directory"


@pytest.mark.parametrize(
    "text",
    [
        "plugin.get_plugin_data_dir()",
        "plugin.get_plugin_path()",
        "getattr(plugin, 'get_plugin_path')()",
        f"{ROOT}def write():\n    with open(root / 'x', 'a') as file: file.write('1')",
        f"{ROOT}import json",
        f"{ROOT}from . import sqlite3",
    ],
)
def test_code_that_opens_files_for_a_moment_is_synced(text: str) -> None:
    assert policy(text).startswith("synced: 0.py:1 uses get_plugin_")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sqlite3", "1.py:1 imports sqlite3"),
        ("def f():\n    import faiss.contrib", "1.py:2 imports faiss"),
        ("from sqlalchemy.ext.asyncio import create_async_engine", "1.py:1 imports sqlalchemy"),
        ("import shelve as s", "1.py:1 imports shelve"),
        ("log = open('log', mode='a')", "1.py:1 opens a file for append at import"),
        ("class A:\n    log = Path('x').open('ab')", "1.py:2 opens a file for append at import"),
        ("handler = logging.handlers.RotatingFileHandler('x')", "1.py:1 uses RotatingFileHandler"),
        ("url = resolve_db_url()", "1.py:1 uses resolve_db_url"),
        ("from nekro_agent.core.tortoise_config import resolve_db_url", "1.py:1 uses resolve_db_url"),
    ],
)
def test_code_that_keeps_files_open_is_pinned(text: str, reason: str) -> None:
    assert policy(ROOT, text) == f"pinned: {reason}"


@pytest.mark.parametrize("text", ["x = 1" + " + 1" * 1_200, "x = a" + ".b()" * 700, "(" * 100_000])
def test_code_that_nests_deep_is_read_as_far_as_possible(text: str) -> None:
    assert policy(text, ROOT).startswith("synced: 1.py:1 uses")


def test_names_beside_the_code_that_are_no_files_are_skipped(tmp_path: Path) -> None:
    package = tmp_path / "odd"
    (package / "directory.py").mkdir(parents=True)
    (package / ".#draft.py").symlink_to("nowhere")
    (package / "__init__.py").write_text(
        "from nekro_agent.api.plugin import NekroPlugin\n"
        "plugin = NekroPlugin(name='odd', module_name='odd', description='', version='1', author='Ada', "
        f"url='')\n{ROOT}"
    )
    (loaded,) = load_plugins([tmp_path], shipped=False, entry_points=False).plugins
    assert PluginDirs().choose(loaded).policy is DirectoryPolicy.SYNCED


def test_published_plugins_have_the_policy_of_what_they_do(tmp_path: Path) -> None:
    loaded = load_plugins([AUTHORED], data_dir=tmp_path, entry_points=False)
    dirs = PluginDirs()
    entries = {entry.key: entry for entry in LoadedRegistry(loaded.plugins, dirs=dirs).plugins}
    by_policy = {
        kind: {plugin.module_name for plugin in loaded.plugins if dirs.policy_of(plugin.key) == kind}
        for kind in DirectoryPolicy
    }
    assert {"basic", "notes", "pictures", "preferences"} <= by_policy[DirectoryPolicy.UNUSED]
    assert {"model_store", "path_at_import", "group_diary"} <= by_policy[DirectoryPolicy.SYNCED]
    for plugin in loaded.plugins:
        entry = entries[plugin.key]
        assert entry.files == dirs.policy_of(plugin.key).value
        assert entry.files_reason
        assert entry.pinned or entry.files != "pinned"


def plugin() -> NekroPlugin:
    return NekroPlugin(name="Notes", module_name="notes", description="", version="1", author="ada", url="")


def test_a_setting_replaces_the_choice_and_pins() -> None:
    dirs, notes = PluginDirs(["ada.notes=pinned"]), plugin()
    (entry,) = LoadedRegistry([notes], dirs=dirs).plugins
    assert (entry.files, entry.pinned) == ("pinned", True)
    assert entry.files_reason == "NEKRO_FILES__PLUGIN_DIRS names it"
    (entry,) = LoadedRegistry([plugin()]).plugins
    assert (entry.files, entry.files_reason, entry.pinned) == ("", "", False)


def test_a_setting_of_an_unknown_plugin_is_an_error_that_names_it() -> None:
    dirs = PluginDirs(["ada.note=synced"])
    with pytest.raises(SettingsError, match=r"names ada\.note, but .* there are: ada\.notes"):
        dirs.require_known(["ada.notes"])


@pytest.mark.parametrize("value", ["ada.notes", "ada.notes=copied", "=local"])
def test_a_setting_of_an_unknown_policy_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NEKRO_FILES__PLUGIN_DIRS", value)
    with pytest.raises(SettingsError, match="the policies are local, synced, pinned"):
        Settings.load(env_file=None)


def test_hosts_that_share_a_disk_choose_nothing() -> None:
    assert plugin_dirs(FileSettings()) is None
