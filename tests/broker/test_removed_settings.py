"""A removed setting is an error that names what replaces it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker_config.setting_sources import REMOVED_SETTINGS
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


def test_removed_settings_are_unknown_and_their_replacements_are_known() -> None:
    assert KNOWN.isdisjoint(REMOVED_SETTINGS)
    named = {variable for hint in REMOVED_SETTINGS.values() for variable in re.findall(r"NEKRO_\w+", hint)}
    assert named <= KNOWN
