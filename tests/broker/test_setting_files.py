"""Secrets read from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_config.settings import Settings
from nekro_agent.errors import SettingsError


def test_a_setting_is_read_from_the_file_named_by_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("first line\n")
    (tmp_path / "url").write_text("postgresql://nekro:p%40ss@db/nekro\n")
    monkeypatch.setenv("NEKRO_SECURITY__SIGNING_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("NEKRO_DATABASE__URL_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("NEKRO_DATABASE__POOL_SIZE", "7")
    settings = Settings.load(env_file=None)
    assert settings.security.signing_key is not None
    assert settings.security.signing_key.get_secret_value() == "first line"
    assert (settings.database.url, settings.database.pool_size) == ("postgresql://nekro:p%40ss@db/nekro", 7)
    assert set(settings.secret_values()) == {"first line", "p@ss"}


def test_a_data_directory_that_is_stated_counts_as_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEKRO_DATA_DIR", raising=False)
    assert not Settings.load(env_file=None).is_data_dir_set
    assert Settings.load(env_file=None, data_dir=Path("data")).is_data_dir_set
    monkeypatch.setenv("NEKRO_DATA_DIR", "data")  # the default, stated
    assert Settings.load(env_file=None).is_data_dir_set


def test_a_setting_given_twice_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("redis://a")
    monkeypatch.setenv("NEKRO_BROKER__URL_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("NEKRO_BROKER__URL", "redis://b")
    with pytest.raises(SettingsError, match="NEKRO_BROKER__URL and NEKRO_BROKER__URL_FILE are both set"):
        Settings.load(env_file=None)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"\xff", "UTF-8"), (b"x" * 99_999, "right file")]
)
def test_an_unreadable_file_is_named(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("NEKRO_BROKER__URL_FILE", str(path))
    with pytest.raises(SettingsError, match=f"NEKRO_BROKER__URL_FILE.*{reason}"):
        Settings.load(env_file=None)


def test_a_file_for_an_unknown_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEKRO_BROKER__ULR_FILE", "/x")
    with pytest.raises(SettingsError, match="Unknown setting"):
        Settings.load(env_file=None)
