"""The Celery application: validated settings, queues, and arguments in message headers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from threading import Thread

import pytest
from celery.app.defaults import SETTING_KEYS
from waiting import WAIT_SECONDS

from broker_config.app import (
    UNLISTED_KEYS,
    celery_settings,
    checked_settings,
    checked_task_options,
    create_app,
)
from broker_config.settings import Settings
from nekro.broker.delivery.connection import PlainAmqpConnection
from nekro.broker.delivery.messages import HIDDEN
from nekro_agent.errors import SettingsError

MakeSettings = Callable[..., Settings]


def test_every_setting_of_the_app_is_known_to_celery(make_settings: MakeSettings) -> None:
    values = celery_settings(make_settings(), lane="methods")
    assert set(values) <= SETTING_KEYS | UNLISTED_KEYS
    assert not UNLISTED_KEYS & SETTING_KEYS, "Celery lists it now: drop it from UNLISTED_KEYS"


def test_misspelt_setting_is_refused_with_the_intended_name() -> None:
    with pytest.raises(SettingsError, match=r"worker_prefetch_multipler; did you mean worker_prefetch_mult"):
        checked_settings({"worker_prefetch_multipler": 1})


def test_misspelt_task_option_is_refused_with_the_intended_name() -> None:
    assert checked_task_options(acks_late=True, name="x") == {"acks_late": True, "name": "x"}
    with pytest.raises(SettingsError, match="did you mean acks_late"):
        checked_task_options(acks_lte=True)


def test_only_json_is_accepted_anywhere(make_settings: MakeSettings) -> None:
    conf = create_app(make_settings()).conf
    assert list(conf.accept_content) == ["json"]
    assert list(conf.result_accept_content) == ["json"]
    assert conf.task_serializer == conf.result_serializer == "json"


def test_each_lane_stores_its_deliveries_under_its_own_keys(make_settings: MakeSettings) -> None:
    settings = make_settings()
    methods = create_app(settings, lane="methods").conf.broker_transport_options
    long = create_app(settings, lane="long").conf.broker_transport_options
    for key in ("unacked_key", "unacked_index_key", "unacked_mutex_key"):
        assert methods[key] != long[key]


def test_pinned_plugins_have_a_queue_each(make_settings: MakeSettings) -> None:
    app = create_app(make_settings(workers={"pinned_plugins": ("alice.bot",)}))
    assert set(app.amqp.queues) == {"methods", "long", "rounds", "pinned", "pinned.alice.bot"}


def test_closing_an_app_sets_no_time_limit_for_other_sockets(
    make_settings: MakeSettings, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(make_settings(broker={"url": redis_url}))
    with app.pool.acquire() as connection:
        client = connection.default_channel.client
        assert client.ping()
    limits: list[float | None] = []
    monkeypatch.setattr(socket, "setdefaulttimeout", limits.append)
    app.close()
    assert limits == []
    assert not any(known._sock for known in client.connection_pool._available_connections)


def test_the_hub_waits_for_a_broadcast_no_longer_than_for_an_answer(
    make_settings: MakeSettings, redis_url: str
) -> None:
    """Data that announces a broadcast may stop before its end: the server was frozen, or cut off."""
    app = create_app(make_settings(broker={"url": redis_url, "socket_timeout_seconds": 1}))
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        channel.subclient.psubscribe("nothing.*")
        channel._receive()  # the confirmation
        look = Thread(target=channel._receive, daemon=True)
        look.start()
        look.join(WAIT_SECONDS)
        assert not look.is_alive()


def test_app_without_a_broker_url_is_refused(make_settings: MakeSettings) -> None:
    with pytest.raises(SettingsError, match="NEKRO_BROKER__URL"):
        create_app(make_settings(broker={"url": None}))


def test_results_on_another_backend_than_redis_are_refused_without_showing_the_password(
    make_settings: MakeSettings,
) -> None:
    with pytest.raises(SettingsError) as caught:
        create_app(make_settings(results={"url": "amqp://user:hunter22@host//"}))
    assert "not a Redis URL" in str(caught.value)
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["amqp", "amqps"])
def test_connections_to_rabbitmq_decompress_nothing(make_settings: MakeSettings, scheme: str) -> None:
    settings = make_settings(
        broker={"url": f"{scheme}://127.0.0.1:1//"}, results={"url": "redis://127.0.0.1:1/0"}
    )
    app = create_app(settings)
    pooled = app.pool.acquire()
    for connection in (app.connection_for_read(), app.connection_for_write(), pooled):
        assert connection.get_transport_cls().Connection is PlainAmqpConnection
    assert pooled.transport_options["answer_seconds"] == settings.broker.socket_timeout_seconds
    pooled.release()
    app.close()


def test_rabbitmq_gets_quorum_queues_without_redis_options(
    make_settings: MakeSettings, redis_url: str
) -> None:
    settings = make_settings(broker={"url": "amqp://guest:guest@localhost//"}, results={"url": redis_url})
    conf = create_app(settings).conf
    assert conf.broker_transport_options == {"confirm_publish": True}
    assert all(queue.queue_arguments == {"x-queue-type": "quorum"} for queue in conf.task_queues)


def test_message_headers_show_no_arguments(make_settings: MakeSettings) -> None:
    app = create_app(make_settings())
    message = app.amqp.create_task_message("id", "a.b.c", ["hunter22", {"password": "hunter22"}], {})
    assert message.headers["argsrepr"] == message.headers["kwargsrepr"] == HIDDEN
    assert "hunter22" not in repr(message.headers)
    app.close()
