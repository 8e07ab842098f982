"""Model groups in the settings: their names, their sources, and where their keys do not appear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker_config.model_groups import chat_groups, model_group
from broker_config.settings import Settings
from nekro.cli.commands.doctor import list_settings
from nekro.cli.environment import environment_of
from nekro.plugins.configuration import core_config
from nekro_agent.errors import ModelGroupError, SettingsError

PREFIX = "NEKRO_MODELS__"
A = f"{PREFIX}A__"
GROUP = {f"{A}MODEL": "m", f"{A}BASE_URL": "http://x"}


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
        NEKRO_MODELS=json.dumps(
            {"Text_Embedding": {"model": "old", "embedding": True}, "绘图": {"model": "x"}}
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
    assert Settings.load(env_file=None).models == settings.models
    monkeypatch.delenv("NEKRO_MODELS")
    assert "NEKRO_MODELS" not in environment_of(Settings(), {})


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
        ({f"{PREFIX}A__BASE_URL": "http://x"}, "MODELS__A__MODEL: Field required"),
        ({f"{A}MODEL": "m", f"{A}PARAMETERS": "[1]"}, "it is not a JSON object"),
        ({f"{A}MODEL": "m", f"{A}PARAMETERS": '{"stream": true}'}, "stream cannot be set here"),
        ({f"{A}MODEL": "m", f"{A}EMBEDDING": "1", f"{A}DRAW": "1"}, "EMBEDDING and DRAW exclude each other"),
        ({f"{PREFIX}DEFAULT__MODEL": "m"}, "group default is that of NEKRO_LLM__"),
        (
            GROUP | {f"{A}FALLBACKS": "b"},
            f"{A}FALLBACKS names b, which is not a model group. There are: default, a",
        ),
        (GROUP | {f"{A}FALLBACKS": "a"}, f"{A}FALLBACKS leads back to a: a -> a"),
        (
            GROUP | {f"{A}FALLBACKS": "default", "NEKRO_LLM__FALLBACKS": "a"},
            "NEKRO_LLM__FALLBACKS leads back to default: default -> a -> default",
        ),
        (
            GROUP | {f"{A}EMBEDDING": "1", "NEKRO_LLM__FALLBACKS": "a"},
            "NEKRO_LLM__FALLBACKS names a, which does not answer chats",
        ),
        ({"NEKRO_MODEL_GROUPS__A__MODEL": "m"}, "It was removed; unset it. Now: NEKRO_MODELS__A__MODEL."),
        ({"NEKRO_MODEL_GROUPS__A__TYPE": "draw"}, "Now: NEKRO_MODELS__A__EMBEDDING=true, or DRAW=true."),
        ({"NEKRO_MODEL_GROUPS": "{}"}, "Now: NEKRO_MODELS."),
        ({"NEKRO_MODELS": '{"a": 1}'}, "NEKRO_MODELS__A"),
        ({"NEKRO_MODELS": "{"}, "NEKRO_MODELS is not valid JSON: Expecting property name"),
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
        ("绘图", 'define it in NEKRO_MODELS, as JSON: {"绘图"'),
    ],
)
def test_a_missing_group_names_the_variable_that_defines_it(name: str, hint: str) -> None:
    config = core_config(Settings())
    for ask in (config.get_model_group_info, config.MODEL_GROUPS.__getitem__):
        with pytest.raises(KeyError) as missing:
            ask(name)
        assert hint in missing.value.args[0]


def test_the_limits_of_histories_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = core_config(load(monkeypatch, NEKRO_RETENTION__MESSAGES_DAYS="2"))
    assert (config.AI_CHAT_CONTEXT_MAX_LENGTH, config.AI_CHAT_CONTEXT_EXPIRE_SECONDS) == (32, 2 * 86_400)
    monkeypatch.delenv("NEKRO_RETENTION__MESSAGES_DAYS")
    assert core_config(Settings()).AI_CHAT_CONTEXT_EXPIRE_SECONDS > 365 * 86_400


def test_groups_resolve_to_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(
        monkeypatch,
        **GROUP,
        **{f"{A}PARAMETERS": '{"top_p": 0.5}', f"{A}INPUT_PRICE": "2", f"{A}CONTEXT_TOKENS": "1000"},
        **{f"{PREFIX}B__MODEL": "b", f"{PREFIX}B__FALLBACKS": "A, default", f"{A}FALLBACKS": "c_c"},
        **{f"{PREFIX}C_C__MODEL": "c", f"{PREFIX}E__MODEL": "e", f"{PREFIX}E__EMBEDDING": "yes"},
        NEKRO_LLM__BASE_URL="http://main",
        NEKRO_LLM__MODEL="main",
        NEKRO_LLM__API_KEY="k",
        NEKRO_LLM__PARAMETERS='{"temperature": 0.5, "seed": 1}',
    )
    a, default = model_group(settings, "A"), model_group(settings, "default")
    assert (a.base_url, a.api_key, a.parameters) == ("http://x", None, {"top_p": 0.5})
    assert (a.input_price, a.cached_input_price, a.context_tokens) == (2, 2, 1000)
    assert default.parameters == {"temperature": 0.5, "seed": 1} and default.context_tokens is None
    assert model_group(settings, "c-c").api_key is default.api_key
    assert [group.name for group in chat_groups(settings, "b")] == ["b", "a", "c-c", "default"]
    with pytest.raises(ModelGroupError, match="there is no model group 'x'; define it with NEKRO_MODELS__X"):
        model_group(settings, "x")
    with pytest.raises(ModelGroupError, match="model group e has EMBEDDING set"):
        chat_groups(settings, "e")
