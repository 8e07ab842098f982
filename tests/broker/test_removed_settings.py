"""A removed setting is an error that names what replaces it; one that is a constant now is a warning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from broker_config.setting_sources import FIXED_SETTINGS, REMOVED_SETTINGS
from broker_config.settings import Settings, known_variables
from nekro_agent.errors import SettingsError

KNOWN = {variable for variable, _, _ in known_variables()}


@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_a_removed_setting_is_an_error_with_its_replacement(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError) as caught:
        Settings.load(env_file=None)
    assert str(caught.value) == (
        f"Unknown setting {name}. It was removed; unset it. Now: {REMOVED_SETTINGS[name]}."
    )


def test_a_removed_setting_in_a_file_of_either_form_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(REMOVED_SETTINGS))
    (tmp_path / ".env").write_text(f"{name}=1\n")
    with pytest.raises(SettingsError, match="was removed"):
        Settings.load(env_file=tmp_path / ".env")
    monkeypatch.setenv(f"{name}_FILE", "/x")
    with pytest.raises(SettingsError, match="was removed"):
        Settings.load(env_file=None)


@pytest.mark.parametrize("form", ["{name}", "{name}_FILE"])
def test_variables_of_constants_are_ignored_and_the_log_says_what_holds(
    form: str, monkeypatch: pytest.MonkeyPatch, logged: list[tuple[str, dict[str, Any]]]
) -> None:
    before = Settings.load(env_file=None)
    for name in FIXED_SETTINGS:
        monkeypatch.setenv(form.format(name=name), "not a value")
    assert Settings.load(env_file=None) == before
    named = {fields["variable"]: (event, fields["since"], fields["now"]) for event, fields in logged}
    assert named == {
        form.format(name=name): ("removed_setting_ignored", "0.3", now)
        for name, now in FIXED_SETTINGS.items()
    }


@pytest.mark.parametrize("form", ["{name}=x", "export {name}_FILE=/x"])
def test_constants_in_a_file_are_ignored_with_a_warning(
    form: str, tmp_path: Path, logged: list[tuple[str, dict[str, Any]]]
) -> None:
    before = Settings.load(env_file=None)
    path = tmp_path / ".env"
    path.write_text("".join(f"{form.format(name=name)}\n" for name in FIXED_SETTINGS))
    assert Settings.load(env_file=path) == before
    assert len(logged) == len(FIXED_SETTINGS)


def test_removed_settings_are_unknown_and_their_replacements_are_known() -> None:
    removed = REMOVED_SETTINGS | FIXED_SETTINGS
    assert len(removed) == len(REMOVED_SETTINGS) + len(FIXED_SETTINGS) and KNOWN.isdisjoint(removed)
    named = {variable for hint in removed.values() for variable in re.findall(r"NEKRO_[A-Z_]+", hint)}
    assert named <= KNOWN
