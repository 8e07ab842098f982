"""One URL in three spellings, and what is hidden in texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_config.redaction import Redactor
from broker_config.urls import backend_url, client_url, is_redis, kombu_url, url_of_backend, without_password
from nekro_agent.errors import SettingsError

BACKEND = "m:C"


@pytest.mark.parametrize(
    ("url", "kombu", "client", "backend"),
    [
        ("redis://h:1/2", "redis://h:1/2", "redis://h:1/2", "m:C+redis://h:1/2"),
        ("rediss://h:1/2", "rediss://h:1/2", "rediss://h:1/2", "m:C+rediss://h:1/2"),
        ("unix:///a/b.sock", "redis+socket:///a/b.sock", "unix:///a/b.sock", "m:C+socket:///a/b.sock"),
        (
            "redis+socket:///a/b.sock?virtual_host=3",
            "redis+socket:///a/b.sock?virtual_host=3",
            "unix:///a/b.sock?db=3",
            "m:C+socket:///a/b.sock?virtual_host=3",
        ),
        (
            "unix://u:p@/a%20b?db=3",
            "redis+socket://u:p@/a%20b?virtual_host=3",
            "unix://u:p@/a%20b?db=3",
            "m:C+socket://u:p@/a%20b?virtual_host=3",
        ),
    ],
)
def test_redis_url_is_spelled_for_each_reader(url: str, kombu: str, client: str, backend: str) -> None:
    assert is_redis(url)
    assert kombu_url(url) == kombu
    assert client_url(url) == client
    assert backend_url(url, backend=BACKEND) == backend
    assert client_url(url_of_backend(backend)) == client


def test_other_brokers_pass_through_and_cannot_hold_results() -> None:
    url = "amqp://user:secret@host:5672//"
    assert kombu_url(url) == url
    with pytest.raises(SettingsError, match="not a Redis URL"):
        client_url(url)
    assert without_password(url) == "amqp://user:**@host:5672//"
    assert without_password("redis://host/0") == "redis://host/0"


def test_redactor_hides_secrets_paths_and_url_passwords() -> None:
    redact = Redactor(["sk-1234", "p@ss/word", "ab"], [Path("/srv/nekro"), "/srv/nekro/data"])
    text = "key sk-1234, p%40ss%2Fword, ab in /srv/nekro/data/x.txt and /srv/nekro/y; redis://u:pw@h/0"
    assert redact(text) == "key [secret], [secret], ab in [host]/x.txt and [host]/y; redis://u:[secret]@h/0"


def test_redactor_hides_the_longest_secret_first() -> None:
    assert Redactor(["abcd", "abcdef"])("abcdef abcd") == "[secret] [secret]"


def test_redactor_without_secrets_leaves_text_alone() -> None:
    assert Redactor()("plain text: nothing") == "plain text: nothing"
