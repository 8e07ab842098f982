"""A plugin whose import takes long does not delay the others, and is loaded when it is ready."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loaded_plugins import end_patience_with, unload_plugins
from waiting import WAIT_SECONDS

from nekro.plugins.entries import PluginEntry, PluginStatus
from nekro.plugins.loader import LoadedPlugins, load_plugins

PLUGIN = """
from nekro_agent.api.plugin import NekroPlugin

plugin = NekroPlugin("n", "{name}", "d", "1", "Ada", "u")
"""
#: Waits for a file at import.
SLOW = """
import pathlib
import time

print("it is imported")
while not pathlib.Path({path!r}).exists():
    time.sleep(0.01)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plugins").mkdir()
    return tmp_path / "plugins"


class Loaded:
    """Plugins of a folder, loaded as by a worker."""

    def __init__(self, folder: Path, *, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self.steps: list[str] = []

        def keep(text: str) -> None:
            self.steps.append(text)
            on_progress(text)

        self.loaded: LoadedPlugins = load_plugins(
            [folder],
            shipped=False,
            entry_points=False,
            data_dir=folder.parent / "data",
            patience_seconds=WAIT_SECONDS,
            on_progress=keep,
        )

    @property
    def statuses(self) -> dict[str, PluginStatus]:
        return {record.key: record.status for record in self.loaded.records}


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """A file on which slow plugins wait; at the end it exists."""
    yield tmp_path / "go"
    (tmp_path / "go").touch()


def test_a_slow_import_is_left_out_and_goes_on(
    folder: Path, go: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a_slow.py").write_text(SLOW.format(path=str(go)) + PLUGIN.format(name="slow"))
    (folder / "b_quick.py").write_text(PLUGIN.format(name="quick"))
    stdout = sys.stdout
    loading = Loaded(folder, on_progress=end_patience_with(monkeypatch, "a_slow"))
    assert loading.statuses == {"a_slow": PluginStatus.STARTING, "Ada.quick": PluginStatus.OK}
    slow = loading.loaded.records[0]
    assert slow.error is not None
    assert f"its import takes longer than {WAIT_SECONDS:g} s (NEKRO_PLUGINS__START_SECONDS)" in slow.error
    assert f"importing a_slow ({folder}/a_slow.py)" in loading.steps
    assert f"importing b_quick ({folder}/b_quick.py)" in loading.steps
    later = loading.loaded.found[0].later
    assert later is not None
    go.touch()
    imported = later.result(WAIT_SECONDS)
    assert (imported.key, imported.error) == ("Ada.slow", None)
    # What plugins printed, and the streams afterwards.
    os.write(1, b"answer")
    captured = capfd.readouterr()
    assert (captured.out, "it is imported" in captured.err) == ("answer", True)
    assert sys.stdout is stdout
    unload_plugins(loading.loaded)


@pytest.mark.parametrize(
    "code",
    [
        "import asyncio\nloop = asyncio.get_event_loop()\nevent = asyncio.Event()\n",
        "import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\n",
    ],
    ids=["an event loop", "a signal handler"],
)
def test_a_plugin_may_use_at_import_what_the_main_thread_has(folder: Path, code: str) -> None:
    (folder / "one.py").write_text(code + PLUGIN.format(name="one"))
    loading = Loaded(folder)
    assert loading.statuses == {"Ada.one": PluginStatus.OK}, loading.loaded.records
    unload_plugins(loading.loaded)


def test_imports_do_not_share_a_thread_that_one_of_them_blocks(
    folder: Path, go: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (folder / f"{name}.py").write_text(SLOW.format(path=str(go)) + PLUGIN.format(name=name))
    (folder / "d.py").write_text(PLUGIN.format(name="d"))
    loading = Loaded(folder, on_progress=end_patience_with(monkeypatch, "a", "b", "c"))
    assert set(loading.statuses) == {"a", "b", "c", "Ada.d"}
    go.touch()
    waiting = [found.later for found in loading.loaded.found if found.later is not None]
    assert [later.result(WAIT_SECONDS).key for later in waiting] == ["Ada.a", "Ada.b", "Ada.c"]
    names = {thread.name for thread in threading.enumerate()}
    assert "nekro-import-d" not in names
    unload_plugins(loading.loaded)


def test_older_releases_read_a_plugin_that_starts_as_one_that_failed() -> None:
    entry = PluginEntry(key="slow", status=PluginStatus.STARTING, error="it takes long")
    assert '"status":"failed"' in entry.to_json()
    assert PluginEntry.from_json(entry.to_json()) == entry


async def test_an_import_does_not_change_the_loop_of_its_caller(folder: Path) -> None:
    (folder / "one.py").write_text(PLUGIN.format(name="one"))
    loop = asyncio.get_running_loop()
    loading = await asyncio.to_thread(Loaded, folder)
    assert asyncio.get_running_loop() is loop
    unload_plugins(loading.loaded)
