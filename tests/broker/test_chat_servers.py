"""The list of servers that chats are partitioned over, and the choice among them."""

from __future__ import annotations

from collections import Counter

import pytest

from broker_config.partitions import ChatServers, server_settings
from broker_config.settings import BrokerSettings, Settings
from nekro_agent.errors import SettingsError

FIRST = "redis://a:6379/0"
CHATS = [f"chat{number}" for number in range(3000)]


def loaded(**broker: object) -> Settings:
    return Settings.load(env_file=None, broker=broker)


def servers(*partitions: str, url: str = FIRST) -> ChatServers:
    return ChatServers(BrokerSettings(url=url, partitions=partitions))


def best(chosen: ChatServers) -> dict[str, int]:
    return {chat: chosen.order(chat)[0] for chat in CHATS}


@pytest.mark.parametrize(
    ("broker", "fault"),
    [
        (
            {"partitions": "redis://b/0"},
            "PARTITIONS needs a Redis in URL, which is unset; set NEKRO_BROKER__URL",
        ),
        (
            {"url": "amqp://u:secret@m", "partitions": "redis://b/0"},
            r"which is amqp://u:\*\*@m; set NEKRO_BROKER__URL to the first Redis server, or unset",
        ),
        ({"url": FIRST, "partitions": "redis://:secret@a:6379/0"}, "name redis://a:6379/0 more than once"),
        ({"url": FIRST, "partitions": "redis://b,redis://b#drain"}, "name redis://b more than once"),
        ({"url": FIRST, "partitions": "redis://b#gone"}, "ends with #gone; write #drain, or nothing"),
        (
            {"url": FIRST, "partitions": "amqp://u:secret@m"},
            "amqp:// is not a Redis; write redis://host:6379/0",
        ),
        ({"url": FIRST, "partitions": "host"}, "a URL has no scheme; write redis://host:6379/0"),
        (
            {"url": FIRST, "partitions": "sentinel://u:p@b/0;sentinel://c/1"},
            "its URLs have different databases",
        ),
    ],
)
def test_a_wrong_list_is_refused_with_the_value_and_the_fix(broker: dict[str, str], fault: str) -> None:
    with pytest.raises(SettingsError, match=fault) as caught:
        loaded(**broker)
    assert "secret" not in str(caught.value)


def test_without_partitions_every_chat_has_the_one_server() -> None:
    assert set(map(tuple, map(servers().order, CHATS))) == {(0,)}


def test_a_new_server_takes_its_share_and_moves_no_other_chat() -> None:
    two, three = best(servers("redis://b/0")), best(servers("redis://b/0", "redis://c/0"))
    moved = {chat for chat in CHATS if two[chat] != three[chat]}
    assert {three[chat] for chat in moved} == {2}
    shares = Counter(three.values())
    assert all(len(CHATS) / 3 * 0.85 < share < len(CHATS) / 3 * 1.15 for share in shares.values()), shares


def test_the_place_in_the_list_and_passwords_decide_nothing() -> None:
    names = {0: "a", 1: "b", 2: "c"}
    one = {chat: names[number] for chat, number in best(servers("redis://b/0", "redis://c/0")).items()}
    names = {0: "a", 1: "c", 2: "b"}
    other = servers("redis://u:p@c/0", "redis://:x@b/0", url="redis://:y@a:6379/0")
    assert {chat: names[number] for chat, number in best(other).items()} == one


def test_the_first_server_is_the_last_choice_of_each_chat() -> None:
    orders = set(map(tuple, map(servers("redis://b/0", "redis://c/0").order, CHATS)))
    assert all(order[-1] == 0 for order in orders)
    assert {(0,), (1, 0), (2, 0), (1, 2, 0), (2, 1, 0)} == orders


def test_a_drained_server_is_served_and_not_chosen() -> None:
    settings = loaded(url=FIRST, partitions="redis://b/0#drain,redis://c/0")
    assert set(best(ChatServers(settings.broker)).values()) == {0, 2}
    assert [one.broker.url for one in server_settings(settings)] == [FIRST, "redis://b/0", "redis://c/0"]


def test_answers_are_on_the_server_of_the_call_unless_all_are_on_one() -> None:
    settings = loaded(url=FIRST, partitions="redis://b/0")
    assert server_settings(settings)[1].results.url == "redis://b/0"
    separate = settings.model_copy(
        update={"results": settings.results.model_copy(update={"url": "redis://r"})}
    )
    assert [one.results.url for one in server_settings(separate)] == ["redis://r", "redis://r"]


def test_passwords_of_partitions_are_secrets() -> None:
    assert "hidden" in loaded(url=FIRST, partitions="redis://:hidden@b/0").secret_values()
