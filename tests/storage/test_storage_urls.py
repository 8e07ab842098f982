"""Accepted database URLs, and the errors for all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import SettingsError
from storage.driver.urls import PoolMode, database_url, libpq_url, pool_mode
from storage.engine import Database


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
    ("parameters", "mode", "others"),
    [
        ("", PoolMode.SESSION, ""),
        ("?pool_mode=session", PoolMode.SESSION, ""),
        ("?pool_mode=transaction", PoolMode.TRANSACTION, ""),
        ("?sslmode=require&pool_mode=transaction", PoolMode.TRANSACTION, "?sslmode=require"),
        (
            "?pool%5Fmode=transaction&application_name=a%26b",
            PoolMode.TRANSACTION,
            "?application_name=a%26b",
        ),
    ],
)
@pytest.mark.parametrize("hosts", ["db:5433", "a:1,b:2"])
def test_the_pool_mode_is_read_from_the_url_and_hidden_from_libpq(
    hosts: str, parameters: str, mode: PoolMode, others: str
) -> None:
    settings = DatabaseSettings(url=f"postgresql://me@{hosts}/x{parameters}")
    assert pool_mode(settings) is mode
    assert libpq_url(settings) == f"postgresql://me@{hosts}/x{others}"
    assert "pool_mode" not in _url(settings.url) and "mode" not in database_url(settings, Path("/d")).query
    assert ("sslmode" in _url(settings.url)) == ("sslmode" in others)


@pytest.mark.parametrize("form", ["postgresql://me:secret@db/x?", "postgresql://me:secret@/x?host=a&host=b&"])
@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ("pool_mode=statement", "pool_mode is 'statement'; write pool_mode=session or pool_mode=transaction"),
        ("pool_mode=Transaction", "pool_mode is 'Transaction'"),
        ("pool_mode=", "pool_mode is ''"),
        ("pool_mode=session&pool_mode=transaction", "2 parameters pool_mode"),
    ],
)
def test_an_unknown_pool_mode_is_refused_before_anything_is_opened(
    form: str, parameter: str, words: str
) -> None:
    with pytest.raises(SettingsError, match="NEKRO_DATABASE__URL") as caught:
        Database(DatabaseSettings(url=form + parameter), Path("/data"))
    assert words in str(caught.value) and "secret" not in str(caught.value)


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
        ("sqlite:///x.db?pool_mode=transaction", "takes no URL parameters, got pool_mode"),
        ("sqlite:///x.db?pool_mode=bogus", "takes no URL parameters, got pool_mode"),
    ],
)
def test_other_urls_are_refused_with_the_fix_and_without_the_password(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match="NEKRO_DATABASE__URL") as caught:
        _url(url)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
