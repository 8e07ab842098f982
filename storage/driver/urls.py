"""Converts the database URL of the settings to the URL that SQLAlchemy needs."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote_plus, urlencode, urlsplit

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import SettingsError

if TYPE_CHECKING:
    from sqlalchemy import URL

__all__ = ["SQLITE_FILE_NAME", "PoolMode", "database_url", "exists", "libpq_url", "pool_mode", "sqlite_path"]

#: Name of the SQLite file in the data directory when no URL is set.
SQLITE_FILE_NAME: Final = "nekro.db"

_VARIABLE: Final = "NEKRO_DATABASE__URL"
_POSTGRESQL: Final = frozenset({"postgresql", "postgres", "postgresql+psycopg"})
#: A SQLite URL that needs no further check.
_PLAIN_SQLITE: Final = re.compile(r"sqlite:///(?!file:|:memory:)([^?#]+)")
#: Our parameter of PostgreSQL's URL; libpq does not know it.
_POOL_MODE: Final = "pool_mode"


class PoolMode(StrEnum):
    """How long a connection to PostgreSQL keeps its server process, as pgbouncer's setting of this name."""

    #: As long as it is open: PostgreSQL itself, or a pooler in session mode.
    SESSION = "session"
    #: For one transaction: a pooler in transaction mode.
    TRANSACTION = "transaction"


def pool_mode(settings: DatabaseSettings) -> PoolMode:
    """Return the pool mode that the URL names; ``session`` when it names none.

    Raises:
        SettingsError: the value is unknown, or is given twice.
    """
    try:
        query = urlsplit(settings.url or "").query
    except ValueError:
        return PoolMode.SESSION  # `database_url` refuses the URL
    given = [value for name, value in parse_qsl(query, keep_blank_values=True) if name == _POOL_MODE]
    if len(given) > 1:
        raise SettingsError(f"{_VARIABLE} has {len(given)} parameters {_POOL_MODE}; keep one")
    value = given[0] if given else PoolMode.SESSION
    if value not in list(PoolMode):
        raise SettingsError(
            f"{_VARIABLE}: {_POOL_MODE} is {value!r}; write "
            + " or ".join(f"{_POOL_MODE}={mode}" for mode in PoolMode)
        )
    return PoolMode(value)


def sqlite_path(settings: DatabaseSettings, data_dir: Path) -> Path | None:
    """Return the file of the URL if it plainly names a SQLite file; None: ask ``database_url``."""
    if settings.url is None:
        return data_dir.absolute() / SQLITE_FILE_NAME
    plain = _PLAIN_SQLITE.fullmatch(settings.url)
    return None if plain is None else Path(plain[1]).expanduser().absolute()


def exists(settings: DatabaseSettings, data_dir: Path) -> bool:
    """Whether the database may exist: False for a SQLite file that only connecting would create."""
    file = sqlite_path(settings, data_dir)
    return file is None or file.exists()


def libpq_url(settings: DatabaseSettings) -> str | None:
    """Return the URL in the form of libpq if it plainly names a PostgreSQL; None: ask ``database_url``.

    SQLAlchemy reads some URLs differently: with ``@`` in a password, or hosts among the parameters.

    Raises:
        SettingsError: as ``pool_mode``.
    """
    try:
        parts = urlsplit(settings.url or "")
        _ = None if "," in parts.netloc else parts.port
    except ValueError:
        return None
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if parts.scheme not in _POSTGRESQL or parts.netloc.count("@") > 1 or "host" in names:
        return None
    pool_mode(settings)  # refuses an unknown value
    return parts._replace(scheme="postgresql", query=_without_pool_mode(parts.query)).geturl()


def database_url(settings: DatabaseSettings, data_dir: Path) -> URL:
    """Return the URL with the driver ``sqlite`` or ``postgresql+psycopg``, without our parameter.

    Raises:
        SettingsError: the URL is malformed, or names another database or driver or an
            in-memory SQLite database, which connections cannot share; or as ``pool_mode``.
    """
    from sqlalchemy import URL, make_url
    from sqlalchemy.exc import ArgumentError as MalformedUrlError

    if settings.url is None:
        return URL.create("sqlite", database=str(data_dir.absolute() / SQLITE_FILE_NAME))
    try:
        url = make_url(_hosts_in_query(settings.url))
    except (MalformedUrlError, ValueError) as exc:
        # The message omits the URL, which may contain a password.
        raise SettingsError(
            f"{_VARIABLE} is not a URL; write postgresql://user:password@host/name or sqlite:///path"
        ) from exc
    if url.drivername in _POSTGRESQL:
        pool_mode(settings)  # refuses an unknown value
        return url.difference_update_query([_POOL_MODE]).set(drivername="postgresql+psycopg")
    if url.drivername == "sqlite":
        return _sqlite(url)
    raise SettingsError(
        f"{_VARIABLE} starts with {url.drivername}://, which is not supported; "
        "write postgresql://user:password@host/name or sqlite:///path"
    )


def _without_pool_mode(query: str) -> str:
    parts = query.split("&")
    return "&".join(part for part in parts if unquote_plus(part.partition("=")[0]) != _POOL_MODE)


def _hosts_in_query(url: str) -> str:
    """Convert libpq's ``postgresql://user@host1:5432,host2:5432/name`` to SQLAlchemy's form."""
    parts = urlsplit(url)
    userinfo, at, hosts = parts.netloc.rpartition("@")
    if "," not in hosts:
        return url
    pairs = [*parse_qsl(parts.query), *(("host", host) for host in hosts.split(","))]
    return f"{parts.scheme}://{userinfo}{at}{parts.path}?{urlencode(pairs)}"


def _sqlite(url: URL) -> URL:
    if url.host:
        raise SettingsError(
            f"{_VARIABLE}: a SQLite URL has no host, but this one has {url.host!r}; "
            "write three slashes before a relative path and four before an absolute one"
        )
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise SettingsError(
            f"{_VARIABLE}: SQLite needs a file, because connections cannot share an in-memory database; "
            "write sqlite:///path or unset the variable"
        )
    if url.query:
        raise SettingsError(
            f"{_VARIABLE}: SQLite takes no URL parameters, got {', '.join(sorted(url.query))}"
        )
    return url.set(database=str(Path(url.database).expanduser().absolute()))
