"""Accepted database URLs, and the errors for all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import SettingsError
from storage.driver.urls import database_url


def _url(url: str | None, data_dir: Path = Path("/data")) -> str:
    return database_url(DatabaseSettings(url=url), data_dir).render_as_string(hide_password=False)


def test_no_url_means_sqlite_in_the_data_directory() -> None:
    assert _url(None) == "sqlite:////data/nekro.db"


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_postgresql_is_opened_with_psycopg(scheme: str) -> None:
    assert _url(f"{scheme}://me:pw@db:5433/x?sslmode=require") == (
        "postgresql+psycopg://me:pw@db:5433/x?sslmode=require"
    )


def test_several_servers_are_given_in_libpqs_form_or_by_parameters() -> None:
    names = ["me:p%40w@a:1,b:2/x?sslmode=require", "me:p%40w@/x?host=a:1&host=b:2&sslmode=require"]
    for url in (database_url(DatabaseSettings(url=f"postgresql://{name}"), Path("/d")) for name in names):
        assert url.password == "p@w" and url.database == "x"
        assert url.query["host"] == ("a:1", "b:2") and url.query["sslmode"] == "require"
    assert _url("postgresql://a,b/x").endswith("/x?host=a&host=b")


def test_relative_sqlite_path_becomes_absolute() -> None:
    assert _url("sqlite:///x.db") == f"sqlite:///{Path.cwd() / 'x.db'}"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "is not a URL"),
        ("mysql://u:secret@h/d", "mysql://, which is not supported"),
        ("sqlite+aiosqlite:///x.db", "sqlite+aiosqlite://, which is not supported"),
        ("postgresql+asyncpg://u:secret@h/d", "write postgresql://"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("sqlite://host/x.db", "three slashes"),
        ("sqlite:///x.db?mode=ro", "takes no URL parameters, got mode"),
    ],
)
def test_other_urls_are_refused_with_the_fix_and_without_the_password(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match="NEKRO_DATABASE__URL") as caught:
        _url(url)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
