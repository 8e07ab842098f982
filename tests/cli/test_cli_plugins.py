"""A plugin at the command line: created, tested, called, and its data purged."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from broker_config.settings import Settings, StoreSettings
from nekro.cli import main
from nekro.cli.output import Output
from nekro_agent import layout
from storage.engine import Database
from storage.kv import SqlKeyValueStore
from storage.migrate import upgrade

pytestmark = pytest.mark.extended

KEY = "you.weather"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working directory without the developer's settings."""
    monkeypatch.chdir(tmp_path)
    for name in ("NEKRO_BROKER__URL", "NEKRO_DATABASE__URL", "NEKRO_DATA_DIR", "NEKRO_PLUGINS__DIRS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_generated_test_of_a_new_plugin_passes_and_detects_a_change(here: Path) -> None:
    assert main.main(["plugins", "new", "weather", "--dir", "mine"]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "mine"]
    passed = subprocess.run(command, capture_output=True, text=True, cwd=here)
    assert "1 passed" in passed.stdout, passed.stdout
    code = here / "mine" / "weather.py"
    code.write_text(code.read_text("utf-8").replace("+ 1", "+ 2"), "utf-8")
    assert "1 failed" in subprocess.run(command, capture_output=True, text=True, cwd=here).stdout


def test_a_test_file_beside_a_plugin_is_not_loaded_as_plugin(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plugins", "new", "weather", "--dir", "mine"]) == 0
    (here / "mine" / "conftest.py").write_text("from weather import plugin\n", "utf-8")
    monkeypatch.setenv("NEKRO_PLUGINS__DIRS", "mine")
    monkeypatch.setenv("NEKRO_PLUGINS__LOAD_SHIPPED", "false")
    capsys.readouterr()
    assert main.main(["plugins"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["KEY", KEY]


def test_colliding_names_are_reported_by_one_command_with_the_names_that_still_work(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plugins", "new", "weather", "--dir", "mine"]) == 0
    with (here / "mine" / "weather.py").open("a", encoding="utf-8") as code:
        code.write(
            '\n\n@plugin.mount_command("sky", "Says what the sky is like")\nasync def sky(context): ...\n'
        )
    twin = (here / "mine" / "weather.py").read_text("utf-8").replace('author="you"', 'author="me"')
    (here / "mine" / "weather_2.py").write_text(twin, "utf-8")
    monkeypatch.setenv("NEKRO_PLUGINS__DIRS", "mine")
    monkeypatch.setenv("NEKRO_PLUGINS__DISABLED", "you.wether")
    capsys.readouterr()
    assert main.main(["plugins"]) == 0
    words = capsys.readouterr().err
    assert "warning: method greet_weather exists in you.weather and me.weather" in words
    assert "the other is callable as me.weather.greet_weather" in words
    assert "warning: command sky of me.weather is shadowed by you.weather's" in words
    of_the_settings = "warning: NEKRO_PLUGINS__DISABLED names you.wether, but no plugin of that key is loaded"
    assert of_the_settings in words
    for command in ("methods", "command"):
        assert main.main([command]) == 0
        words = capsys.readouterr().err
        assert of_the_settings in words and "greet_weather" not in words and "sky" not in words


class Stored:
    """Stored values of two plugins below ``data``."""

    def __init__(self, root: Path) -> None:
        self.settings = Settings.load(env_file=None, data_dir=root / "data")
        asyncio.run(upgrade(self.settings.database, self.settings.data_dir))
        self.files = layout.plugin_dir(self.settings.data_dir, KEY)
        self.config = layout.config_file(self.settings.data_dir, KEY)
        for path in (self.files / "deep" / "file", self.config):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
        asyncio.run(self._fill())

    async def _fill(self) -> None:
        database = Database(self.settings.database, self.settings.data_dir)
        store = SqlKeyValueStore(database, StoreSettings())
        for key in (KEY, "you.weather_more"):
            for chat in ("a", "b"):
                await store.set(key, chat_key=chat, user_key="", store_key="k", value="v")
        await database.dispose()

    async def _counts(self) -> tuple[int, int]:
        database = Database(self.settings.database, self.settings.data_dir)
        store = SqlKeyValueStore(database, StoreSettings())
        counts = (await store.count(KEY), await store.count("you.weather_more"))
        await database.dispose()
        return counts

    @property
    def counts(self) -> tuple[int, int]:
        """Values of the plugin and of another."""
        return asyncio.run(self._counts())


def test_purge_deletes_values_files_and_configuration_of_that_plugin_only(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = Stored(here)
    assert main.main(["plugins", "purge", KEY]) == 2
    refusal = capsys.readouterr().err
    assert "nothing was deleted; --yes deletes" in refusal
    assert (
        "2 stored values" in refusal
        and f"{stored.files} (1 files)" in refusal
        and str(stored.config) in refusal
    )
    assert stored.counts == (2, 2)
    assert main.main(["plugins", "purge", KEY, "--yes"]) == 0
    assert "deleted: 2 stored values" in capsys.readouterr().err
    assert stored.counts == (0, 2)
    assert not stored.files.exists() and not stored.config.exists()
    assert main.main(["plugins", "purge", KEY]) == 0
    assert "has no data" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "left"), [("yes", 0), ("n", 2), ("", 2)])
def test_purge_at_a_terminal_asks_for_confirmation(
    here: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    stored = Stored(here)
    asked: list[str] = []

    def confirms(_output: Output, question: str) -> bool:
        asked.append(question)
        return answer == "yes"

    monkeypatch.setattr(Output, "confirms", confirms)
    main.main(["plugins", "purge", KEY])
    assert stored.counts == (left, 2)
    assert asked == [
        question for question in asked if question.startswith(f"permanently delete the data of {KEY}")
    ]


def test_purge_removes_a_link_in_place_of_the_directory_and_keeps_its_target(here: Path) -> None:
    stored = Stored(here)
    elsewhere = here / "elsewhere"
    stored.files.rename(elsewhere)
    stored.files.symlink_to(elsewhere)
    assert main.main(["plugins", "purge", KEY, "--yes"]) == 0
    assert not stored.files.is_symlink()
    assert (elsewhere / "deep" / "file").exists()


_SLEEPY = '''
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin(
    name="Sleepy", module_name="sleepy", description="Sleeps.", version="1", author="you", url="",
    sleep_brief="Paints pictures.",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "paint", "")
async def paint(_ctx) -> str:
    """Paint."""
    return "done"
'''


def test_a_plugin_is_woken_in_a_chat_listed_and_put_to_sleep(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "sleepy.py").write_text(_SLEEPY, "utf-8")
    monkeypatch.setenv("NEKRO_PLUGINS__DIRS", "sleepy.py")
    settings = Settings.load()
    asyncio.run(_migrated_with_chat(settings, "room"))

    def state(chat: str = "room") -> list[str]:
        capsys.readouterr()
        assert main.main(["plugins", "list", "--chat", chat]) == 0
        (row,) = capsys.readouterr().out.splitlines()[1:]
        return row.split(maxsplit=1)

    assert state() == ["you.sleepy", "asleep  Paints pictures."]
    assert main.main(["plugins", "wake", "you.sleepy", "--chat", "room", "--turns", "3"]) == 0
    assert state()[1].startswith("awake, 3 turns left") and state("other")[1].startswith("asleep")
    assert main.main(["plugins", "wake", "you.sleepy", "--chat", "room"]) == 0
    capsys.readouterr()
    assert main.main(["plugins", "--chat", "room", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told == {
        "key": "you.sleepy", "name": "Sleepy", "is_awake": True, "turns_left": None,
        "brief": "Paints pictures.",
    }  # fmt: skip
    assert main.main(["plugins", "sleep", "you.sleepy", "--chat", "room"]) == 0
    assert state()[1].startswith("asleep")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wake", "nekro.basic", "--chat", "room"], "nekro.basic is always awake"),
        (["wake", "nekro.basics", "--chat", "room"], "did you mean nekro.basic"),
        (["sleep", "nekro.basic"], "name the chat"),
        (["wake", "nekro.basic", "--chat", "room", "--turns", "21"], "--turns 21 must be from 1 to 20"),
        (["list", "--turns", "2"], "--turns belongs to `nekro plugins wake`"),
        (["purge", "nekro.basic", "--chat", "room"], "takes no --chat"),
    ],
)
def test_a_wrong_request_to_wake_a_plugin_says_what_is_wrong(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    asyncio.run(_migrated_with_chat(Settings.load(), "room"))
    assert main.main(["plugins", *arguments]) == 2
    assert message in capsys.readouterr().err


async def _migrated_with_chat(settings: Settings, chat_key: str) -> None:
    await upgrade(settings.database, settings.data_dir)
    database = Database(settings.database, settings.data_dir)
    try:
        async with database.begin() as transaction:
            await transaction.chats.ensure(chat_key)
    finally:
        await database.dispose()
