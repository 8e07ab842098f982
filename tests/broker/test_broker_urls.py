"""One Redis URL in the forms of its three readers, and redaction of texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_config.urls import (
    RedisAddress,
    is_redis,
    kombu_url,
    passwords_of,
    redis_address,
    without_password,
)
from nekro.base.redaction import Redactor
from nekro_agent.errors import SettingsError


@pytest.mark.parametrize(
    ("url", "kombu", "client"),
    [
        ("redis://h:1/2", "redis://h:1/2", "redis://h:1/2"),
        ("rediss://h:1/2", "rediss://h:1/2", "rediss://h:1/2"),
        ("unix:///a/b.sock", "redis+socket:///a/b.sock", "unix:///a/b.sock"),
        (
            "redis+socket:///a/b.sock?virtual_host=3",
            "redis+socket:///a/b.sock?virtual_host=3",
            "unix:///a/b.sock?db=3",
        ),
        (
            "unix://u:p@/a%20b?db=3",
            "redis+socket://u:p@/a%20b?virtual_host=3",
            "unix://u:p@/a%20b?db=3",
        ),
    ],
)
def test_redis_url_is_translated_for_each_reader(url: str, kombu: str, client: str) -> None:
    assert is_redis(url)
    assert kombu_url(url) == kombu
    assert redis_address(url).server_url == client


SENTINELS = "sentinel://me:a%3Bb@one;sentinel://two:7/3"


def test_a_list_of_sentinels_names_one_server() -> None:
    assert is_redis(SENTINELS)
    assert redis_address(SENTINELS) == RedisAddress("redis://me:a%3Bb@/3", (("one", 26379), ("two", 7)))
    assert redis_address("sentinels://[::1]:5").server_url == "rediss:///"


def test_kombu_reads_credentials_and_database_in_each_url_of_the_list() -> None:
    assert kombu_url(SENTINELS) == "sentinel://me:a%3Bb@one:26379/3;sentinel://me:a%3Bb@two:7/3"
    assert kombu_url("sentinels://[::1]:5/1") == "sentinel://[::1]:5/1"


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("sentinel://a;sentinels://b", "one scheme"),
        ("sentinel://a/1;sentinel://b/2", "different databases"),
        ("sentinel://:p@a;sentinel://:q@b", "different credentials"),
        ("sentinel://a:x", "Port"),
        ("sentinel://:26379", "needs a host"),
    ],
)
def test_a_contradictory_list_is_refused_without_its_passwords(url: str, fault: str) -> None:
    with pytest.raises(SettingsError, match=fault) as caught:
        redis_address(url)
    assert ":p@" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["sentinel", "amqp"])
def test_each_password_of_a_list_is_masked(scheme: str) -> None:
    url = f"{scheme}://me:one@a;{scheme}://:two@b:5/0"
    assert without_password(url) == f"{scheme}://me:**@a;{scheme}://:**@b:5/0"
    assert passwords_of(url) == ["one", "two"]
    assert Redactor()(url) == f"{scheme}://me:[secret]@a;{scheme}://:[secret]@b:5/0"


def test_a_semicolon_in_a_password_does_not_make_a_list() -> None:
    assert without_password("redis://:a;b@h/0") == "redis://:**@h/0"


def test_other_brokers_pass_through_and_cannot_hold_results() -> None:
    url = "amqp://user:secret@host:5672//"
    assert kombu_url(url) == url
    with pytest.raises(SettingsError, match="not a Redis URL"):
        redis_address(url)
    assert without_password(url) == "amqp://user:**@host:5672//"
    assert without_password("redis://host/0") == "redis://host/0"


def test_redactor_hides_secrets_paths_and_url_passwords() -> None:
    redact = Redactor(["sk-1234", "p@ss/word", "ab"], [Path("/srv/nekro"), "/srv/nekro/data"])
    text = "key sk-1234, p%40ss%2Fword, ab in /srv/nekro/data/x.txt and /srv/nekro/y; redis://u:pw@h/0"
    assert redact(text) == "key [secret], [secret], ab in [host]/x.txt and [host]/y; redis://u:[secret]@h/0"


def test_redactor_hides_the_longest_secret_first() -> None:
    assert Redactor(["abcd", "abcdef"])("abcdef abcd") == "[secret] [secret]"


def test_redactor_without_secrets_leaves_text_unchanged() -> None:
    assert Redactor()("plain text: nothing") == "plain text: nothing"
