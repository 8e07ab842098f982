"""The URL of files is checked when settings are loaded, and shows no secret."""

from __future__ import annotations

import importlib.util
import traceback

import pytest

from broker_config.settings import Settings
from nekro_agent.errors import SettingsError


def loaded(url: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("NEKRO_FILES__URL", url)
    return Settings.load(env_file=None)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b", "gs://b/p", "az://b/p", "file:///srv/objects"]
)
def test_a_place_is_a_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(url, monkeypatch).files.in_store


def test_live_directories_are_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Settings.load(env_file=None).files.in_store
    assert not loaded("file://", monkeypatch).files.in_store


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("/srv/files", "has no scheme"),
        ("http://bucket/prefix", "http:// is no place for files"),
        ("s3:///prefix", "s3:///prefix names no bucket; it must be s3://bucket/prefix"),
        ("file://host/srv", "names no directory"),
        ("file:///", "names no directory"),
        ("s3://key:hidden@bucket/p", "s3://bucket/p, has more than a place"),
        ("s3://hidden@bucket/p", "s3://bucket/p, has more than a place"),
        ("s3://bucket/p?X-Amz-Signature=hidden", "s3://bucket/p, has more than a place"),
        ("az://bucket/p#hidden", "az://bucket/p, has more than a place"),
    ],
)
def test_a_wrong_url_is_an_error_without_its_secrets(
    url: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="NEKRO_FILES__URL") as caught:
        loaded(url, monkeypatch)
    assert fault in str(caught.value)
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


def test_a_bucket_without_its_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "broker_config.settings.find_spec", lambda name: None if name == "obstore" else found(name)
    )
    with pytest.raises(SettingsError, match=r"pip install 'nekro-workers\[objects\]'"):
        loaded("s3://bucket", monkeypatch)


def test_credentials_of_a_bucket_are_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    assert "hidden" in loaded("s3://bucket", monkeypatch).secret_values()
    assert "hidden" not in loaded("file://", monkeypatch).secret_values()
