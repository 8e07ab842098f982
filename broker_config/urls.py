"""One broker URL, in the three spellings that its readers want.

Redis on a Unix socket is ``redis+socket:///path?virtual_host=0`` to kombu and Celery and
``unix:///path?db=0`` to redis-py. Settings accept both; everything else is passed through.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from nekro_agent.errors import SettingsError

__all__ = ["backend_url", "client_url", "is_redis", "kombu_url", "url_of_backend", "without_password"]

REDIS_SCHEMES = frozenset({"redis", "rediss", "unix", "redis+socket"})
SOCKET_SCHEMES = frozenset({"unix", "redis+socket"})


def is_redis(url: str) -> bool:
    """Whether the URL names a Redis server (over TCP, TLS or a Unix socket)."""
    return urlsplit(url).scheme in REDIS_SCHEMES


def kombu_url(url: str) -> str:
    """Spell a broker URL for kombu; other brokers than Redis are returned unchanged."""
    return _respell(url, scheme="redis+socket", database_field="virtual_host")


def backend_url(url: str, *, backend: str) -> str:
    """Spell a result backend URL for Celery, served by the class at ``module:Class``.

    Raises:
        SettingsError: the URL is not one of a Redis.
    """
    if not is_redis(url):
        raise SettingsError(
            f"NEKRO_RESULTS__URL: {without_password(url)} is not a Redis URL; results need a Redis"
        )
    if urlsplit(url).scheme in SOCKET_SCHEMES:
        return f"{backend}+{kombu_url(url).removeprefix('redis+')}"
    return f"{backend}+{url}"


def url_of_backend(value: str) -> str:
    """The Redis URL inside a value that ``backend_url`` made."""
    url = value.partition("+")[2]
    return f"redis+{url}" if url.startswith("socket:") else url


def client_url(url: str) -> str:
    """Spell a Redis URL for redis-py.

    Raises:
        SettingsError: the URL is not one of a Redis.
    """
    if not is_redis(url):
        raise SettingsError(f"{without_password(url)} is not a Redis URL")
    return _respell(url, scheme="unix", database_field="db")


def without_password(url: str) -> str:
    """The URL with its password masked, for logs and errors."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}:**@{host}").geturl()


def _respell(url: str, *, scheme: str, database_field: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in SOCKET_SCHEMES:
        return url
    query = dict(parse_qsl(parts.query))
    database = query.pop("virtual_host", None) or query.pop("db", None)
    if database:
        query[database_field] = database
    tail = f"?{urlencode(query)}" if query else ""
    return f"{scheme}://{parts.netloc}{quote(parts.path, safe='/%')}{tail}"
