"""Events reach every bound queue, for any chat key."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import redis
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu import Queue

from broker_config import keys
from broker_config.app import NekroApp
from broker_config.keys import pinned_queue
from broker_config.settings import Settings
from broker_config.topology import (
    AGENT_EVENTS,
    encode_chat_key,
    publish_round_requested,
    routing_key_for_chat,
)
from nekro.app.chats.publisher import EventPublisher
from nekro.broker.delivery.messages import CallMessage
from nekro.wire.invocation import Invocation, Signer, new_id
from nekro_agent.methods import Lane

STRANGE_KEYS = [
    "onebot_v11-group_123",
    "a.b.c",
    "#",
    "*",
    "round.requested.#",
    "with space\nand newline",
    "sse:room/1:2",
    "群聊" * 80,
    "😀" * 200,
    "%2E",
    "~",
    "",
    "x" * 1000,
]


@given(st.text(max_size=300))
def test_chat_key_becomes_one_short_routing_word(chat_key: str) -> None:
    word = encode_chat_key(chat_key)
    assert word
    assert word.isascii()
    assert not set(word) & set(".#* \n")
    assert len(routing_key_for_chat("round.requested", chat_key)) <= 255


@given(st.text(), st.text())
def test_different_chat_keys_become_different_routing_words(one: str, other: str) -> None:
    assert (encode_chat_key(one) == encode_chat_key(other)) == (one == other)


async def test_lost_calls_of_every_lane_are_sent_again_once_by_a_process_without_their_pinned_plugin(
    app: NekroApp, settings: Settings
) -> None:
    signer, now = Signer.from_text("test-signing-key"), datetime.now(UTC)
    lanes = [Lane.METHODS.value, pinned_queue("ada.kitchen"), Lane.ROUNDS.value]
    messages = [
        CallMessage.of(
            Invocation(
                call_id=new_id(), method="a.b.c", chat_key="c", container_key="k",
                issued_at=now, deadline=now + timedelta(seconds=60), args="",
            ),
            signer=signer,
            lane=lane,
            reply_to=None,
        )
        for lane in lanes
    ]  # fmt: skip
    publisher = EventPublisher(app)
    try:
        assert await publisher.calls_lost(messages) == len(messages)
        assert await publisher.calls_lost(messages) == 0, "the first copies are still in their queues"
    finally:
        await publisher.close()
    with redis.Redis.from_url(str(settings.broker.url)) as client:
        assert [client.llen(f"{settings.broker.key_prefix}{lane}") for lane in lanes] == [1, 1, 1]


def test_event_of_any_chat_reaches_a_queue_bound_to_all(app: Celery) -> None:
    with app.connection_for_write() as connection:
        everything = Queue("everything", exchange=AGENT_EVENTS, routing_key="round.requested.#")
        others = Queue("others", exchange=AGENT_EVENTS, routing_key="message.sent.#")
        for queue in (everything, others):
            queue(connection).declare()
        for chat_key in STRANGE_KEYS:
            publish_round_requested(app, chat_key)
        bound = everything(connection)
        received = []
        while (message := bound.get(no_ack=True, accept=["json"])) is not None:
            received.append(message.payload[0][0])
        assert received == STRANGE_KEYS
        assert others(connection).get(no_ack=True, accept=["json"]) is None


def test_round_request_is_queued_before_any_worker_has_started(app: Celery) -> None:
    for chat_key in STRANGE_KEYS:
        publish_round_requested(app, chat_key)
    with app.connection_for_write() as connection:
        queue = app.amqp.queues["rounds"](connection)
        received = []
        while (message := queue.get(no_ack=True, accept=["json"])) is not None:
            assert message.headers["task"] == "nekro.rounds.drain"
            received.append(message.payload[0][0])
    assert received == STRANGE_KEYS


def test_round_request_is_queued_after_redis_lost_the_binding(app: Celery) -> None:
    import redis

    publish_round_requested(app, "before")
    prefix = app.conf.broker_transport_options["global_keyprefix"]
    with redis.Redis.from_url(app.conf.broker_url) as client:
        client.delete(*client.keys(f"{prefix}*"))
    publish_round_requested(app, "after")
    with app.connection_for_write() as connection:
        message = app.amqp.queues["rounds"](connection).get(no_ack=True, accept=["json"])
    assert message is not None
    assert message.payload[0] == ["after"]


def test_all_published_keys_have_the_key_prefix(app: Celery, make_settings: Callable[..., Settings]) -> None:
    import redis

    prefix = app.conf.broker_transport_options["global_keyprefix"]
    with redis.Redis.from_url(app.conf.broker_url) as client:
        before = set(client.keys("*"))
        publish_round_requested(app, "x")
        app.backend.store_result("id", "value", "SUCCESS")
        new = set(client.keys("*")) - before
    assert new
    assert all(key.startswith(prefix.encode()) for key in new)


def test_the_list_of_redis_keys_names_each_one() -> None:
    made = re.findall(r'f"\{self\.prefix\}([a-z-]+):?', Path(keys.__file__).read_text("utf-8"))
    assert len(made) > 8
    listed = keys.__doc__ or ""
    of_celery = {"celery-task-meta-"}
    assert [name for name in made if f"<prefix>{name}" not in listed and name not in of_celery] == []


def test_no_other_module_makes_names_of_redis_keys() -> None:
    root = Path(keys.__file__).parents[1]
    found = [
        str(path.relative_to(root))
        for package in ("nekro", "workers", "storage")
        for path in (root / package).rglob("*.py")
        if re.search(r"key_prefix\}[a-z]+:", path.read_text("utf-8"))
    ]
    assert found == []
