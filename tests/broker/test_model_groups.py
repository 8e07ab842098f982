"""Model groups in the settings: their names, their sources, and where their keys do not appear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker_config.settings import Settings
from cli.commands.doctor import list_settings
from cli.environment import environment_of
from nekro_agent.errors import SettingsError
from workers.plugins.policies import core_config

PREFIX = "NEKRO_MODEL_GROUPS__"


def load(monkeypatch: pytest.MonkeyPatch, *, env_file: Path | None = None, **values: str) -> Settings:
    for name, value in values.items():
        monkeypatch.setenv(name.removeprefix("_"), value)
    return Settings.load(env_file=env_file)


def test_variables_json_and_env_files_define_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text(
        f"NEKRO_LLM__BASE_URL=http://main/v1\nNEKRO_LLM__API_KEY=main-key\n{PREFIX}CHAT__MODEL=12345\n"
    )
    settings = load(
        monkeypatch,
        env_file=env_file,
        NEKRO_MODEL_GROUPS=json.dumps(
            {"Text_Embedding": {"model": "old", "type": "embedding"}, "绘图": {"model": "x"}}
        ),
        **{f"{PREFIX}TEXT_EMBEDDING__MODEL": "new", f"{PREFIX}DEFAULT_DRAW_CHAT__MODEL": "d"},
        **{f"{PREFIX}DEFAULT_DRAW_CHAT__BASE_URL": "http://draw/v1"},
    )
    groups = core_config(settings).MODEL_GROUPS
    assert sorted(groups) == ["chat", "default-draw-chat", "text-embedding", "绘图"]
    embedding = groups["text_embedding"]
    assert (embedding.CHAT_MODEL, embedding.MODEL_TYPE, embedding.GROUP_NAME) == (
        "new",
        "embedding",
        "text-embedding",
    )
    assert (embedding.BASE_URL, embedding.API_KEY) == ("http://main/v1", "main-key")
    assert (groups["Default-Draw-Chat"].BASE_URL, groups["default-draw-chat"].API_KEY) == (
        "http://draw/v1",
        "",
    )
    assert groups["chat"].CHAT_MODEL == "12345" and groups.get("none") is None and "none" not in groups


def test_child_processes_get_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(
        monkeypatch,
        **{f"{PREFIX}A_B__MODEL": "m", f"{PREFIX}A_B__BASE_URL": "http://x", f"{PREFIX}A_B__API_KEY": "007"},
    )
    environment = environment_of(settings, {})
    for name in (f"{PREFIX}A_B__MODEL", f"{PREFIX}A_B__BASE_URL", f"{PREFIX}A_B__API_KEY"):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Settings.load(env_file=None).model_groups == settings.model_groups
    monkeypatch.delenv("NEKRO_MODEL_GROUPS")
    assert "NEKRO_MODEL_GROUPS" not in environment_of(Settings(), {})


def test_a_key_may_be_in_a_file_and_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-from-file\n")
    settings = load(
        monkeypatch,
        **{
            f"{PREFIX}A__MODEL": "m",
            f"{PREFIX}A__BASE_URL": "http://x",
            f"{PREFIX}A__API_KEY_FILE": str(tmp_path / "key"),
        },
    )
    assert core_config(settings).MODEL_GROUPS["a"].API_KEY == "sk-from-file"
    assert "sk-from-file" in settings.secret_values()
    shown = [repr(settings), repr(core_config(settings)), json.dumps(list_settings(settings), default=str)]
    assert all("sk-from-file" not in text for text in shown)
    assert '"a: m"' in shown[2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({f"{PREFIX}A__MODLE": "m"}, f"Unknown setting {PREFIX}A__MODLE"),
        (
            {f"{PREFIX}A__MODEL": "m"},
            f"group a has no endpoint. Set {PREFIX}A__BASE_URL or NEKRO_LLM__BASE_URL",
        ),
        ({f"{PREFIX}A__BASE_URL": "http://x"}, "MODEL_GROUPS__A__MODEL: Field required"),
        (
            {f"{PREFIX}A__MODEL": "m", f"{PREFIX}A__TYPE": "song"},
            "Input should be 'chat', 'embedding' or 'draw'",
        ),
        ({"NEKRO_MODEL_GROUPS": '{"a": 1}'}, "NEKRO_MODEL_GROUPS__A"),
        ({"NEKRO_MODEL_GROUPS": "{"}, "NEKRO_MODEL_GROUPS is not valid JSON: Expecting property name"),
    ],
)
def test_wrong_groups_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        load(monkeypatch, **values)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("text-embedding", f"define it with {PREFIX}TEXT_EMBEDDING__MODEL"),
        ("default", "define it with NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL"),
        ("绘图", 'define it in NEKRO_MODEL_GROUPS, as JSON: {"绘图"'),
    ],
)
def test_a_missing_group_names_the_variable_that_defines_it(name: str, hint: str) -> None:
    config = core_config(Settings())
    for ask in (config.get_model_group_info, config.MODEL_GROUPS.__getitem__):
        with pytest.raises(KeyError) as missing:
            ask(name)
        assert hint in missing.value.args[0]


def test_the_limits_of_histories_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = core_config(
        load(monkeypatch, NEKRO_AGENT__HISTORY_MESSAGES="7", NEKRO_RETENTION__MESSAGES_DAYS="2")
    )
    assert (config.AI_CHAT_CONTEXT_MAX_LENGTH, config.AI_CHAT_CONTEXT_EXPIRE_SECONDS) == (7, 2 * 86_400)
    monkeypatch.delenv("NEKRO_RETENTION__MESSAGES_DAYS")
    assert core_config(Settings()).AI_CHAT_CONTEXT_EXPIRE_SECONDS > 365 * 86_400
