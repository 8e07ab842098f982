"""Builds the Celery application from the settings alone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, Final
from weakref import WeakSet

import celery
from celery import Celery
from celery.app.defaults import SETTING_KEYS
from kombu import Connection, pools
from kombu.entity import Queue

from broker_config.embedded import resolve_signing_key
from broker_config.keys import Keys
from broker_config.partitions import ChatServers, server_settings
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import Settings
from broker_config.topology import lane_queue
from broker_config.urls import is_redis, kombu_url, without_password
from nekro.wire.seals import TASK, Seal
from nekro_agent.errors import NekroError, SettingsError
from nekro_agent.methods import Lane

__all__ = [
    "RESULT_SECONDS",
    "NekroApp",
    "celery_settings",
    "checked_settings",
    "checked_task_options",
    "create_app",
]

#: Read by Celery's Redis backend, and missing in its own list of settings.
UNLISTED_KEYS: Final = frozenset({"redis_backend_health_check_interval", "redis_client_name"})
BACKEND: Final = "nekro.broker.celery.result_backend:ReplyBackend"
#: How long a result is kept: a caller that lost its connection reads it again within seconds of reconnecting.
RESULT_SECONDS: Final = 3600
#: Attempts to store a result; with the pauses below they take about half a minute.
RESULT_TRIES: Final = 30


class NekroApp(Celery):  # type: ignore[misc]
    """The application; carries the settings for components that Celery instantiates itself."""

    nekro_settings: Settings
    #: The queue that this process consumes; None for a process that only calls.
    lane: str | None = None
    #: Place of its broker in ``servers``.
    server: int = 0
    #: Its result backends: Celery makes one for each thread.
    backends: WeakSet[Any]
    #: Whether the worker of this process will have more tasks soon: the import of a plugin still runs.
    awaits_plugins: Callable[[], bool] = staticmethod(lambda: False)
    #: On a worker: takes a task's name, id and argument. Returns what a recorded call returned, or its error;
    #: an empty result for a job or a chat without anything left to do; None if it has not ended. It blocks,
    #: and may raise StorageError.
    recorded_end: Callable[[str, str, Any], dict[str, Any] | NekroError | None] | None = None

    @cached_property
    def servers(self) -> tuple[NekroApp, ...]:
        """The applications of all servers that chats are partitioned over, this one first.

        The others have connections, queues and a result backend, but no tasks.
        """
        further = server_settings(self.nekro_settings)[1:]
        apps = tuple(create_app(settings, lane=self.lane) for settings in further)
        for number, app in enumerate(apps, start=1):
            app.server = number
        return (self, *apps)

    @cached_property
    def chats(self) -> ChatServers:
        """Chooses among ``servers``."""
        return ChatServers(self.nekro_settings.broker)

    @cached_property
    def task_seal(self) -> Seal:
        """Signs and verifies task messages.

        Raises:
            SettingsError: the signing key cannot be read.
        """
        return Seal(resolve_signing_key(self.nekro_settings), purpose=TASK)

    def connection_for_write(self, url: str | None = None, **options: Any) -> Connection:
        """Return a connection for sending, which waits for RabbitMQ no longer than others for Redis."""
        broker = self.nekro_settings.broker
        if broker.url is not None and not is_redis(broker.url):
            options["transport_options"] = {
                **(options.get("transport_options") or {}),
                "answer_seconds": broker.socket_timeout_seconds,
            }
        return super().connection_for_write(url, **options)

    def close(self) -> None:
        """Also close the connections that it opened; kombu keeps some until the process ends.

        Another app of the process with the same RabbitMQ shares them, and connects again.
        """
        if self._pool is not None:
            connection = self.connection_for_write()
            # kombu would change the time limit of all new sockets meanwhile; two threads at once leave it so.
            self._pool.collect_resource = _close
            self._pool.force_close_all(close_pool=False)
            for group in (pools.producers, pools.connections):
                with suppress(KeyError):
                    del group[connection]
        if "amqp" in vars(self):
            self.amqp.drop_producers()
        for backend in tuple(self.backends):
            backend.disconnect()
        for app in vars(self).get("servers", ())[1:]:
            app.close()
        super().close()

    def finalize(self, auto: bool = False) -> None:
        """Finish the task registry and remove Celery's built-in tasks, which are not used."""
        was_finalized = self.finalized
        super().finalize(auto=auto)
        if not was_finalized:
            for name in [name for name in self._tasks if name.startswith("celery.")]:
                self._tasks.unregister(name)


def _close(resource: object) -> None:
    """Close a connection of a pool; others of its entries are connections to be made."""
    if not isinstance(resource, Connection) or not resource.connected:
        return
    if resource.transport.driver_type == "amqp":
        resource.collect()  # without the exchange with a server that may not answer
    else:
        with suppress(OSError):
            resource.close()  # its `release` returns it to the pool


def create_app(settings: Settings, *, lane: str | None = None) -> NekroApp:
    """Build the application of one process.

    Args:
        settings: with ``broker.url`` set; see ``broker_config.embedded.resolve_settings``.
        lane: the queue that this process consumes; None for a process that only calls.
            Deliveries of each lane have separate keys: among workers that share keys, the shortest
            visibility timeout silently applies to all.

    Raises:
        SettingsError: a URL is missing or has an unsupported scheme.
    """
    app = NekroApp(
        "nekro",
        set_as_current=False,
        amqp="nekro.broker.celery.tasks:PrivateAMQP",
        control="nekro.broker.celery.remote_control:SignedControl",
        events="nekro.broker.celery.worker:BufferingEvents",
        task_cls="nekro.broker.celery.tasks:PrivateTask",
    )
    app.nekro_settings, app.lane, app.backends = settings, lane, WeakSet()
    app.steps["consumer"].add("nekro.broker.delivery.leases:LeaseStep")
    app.steps["consumer"].add("nekro.broker.celery.further_servers:FurtherServersStep")
    app.steps["consumer"].add("nekro.broker.celery.remote_control:RevocationStep")
    app.conf.update(checked_settings(celery_settings(settings, lane=lane)))
    return app


def checked_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings unchanged if Celery has each name; Celery itself would ignore a typo.

    Raises:
        SettingsError: a name is unknown.
    """
    known = SETTING_KEYS | UNLISTED_KEYS
    _reject_unknown(values, known, kind="Celery setting")
    return dict(values)


def checked_task_options(**options: Any) -> dict[str, Any]:
    """Return the options unchanged if ``celery.Task`` has each of them; Celery would ignore a typo.

    Raises:
        SettingsError: a name is unknown.
    """
    known = {name for name in dir(celery.Task) if not name.startswith("_")} | {"base", "bind", "shared"}
    _reject_unknown(options, known, kind="task option")
    return options


def celery_settings(settings: Settings, *, lane: str | None = None) -> dict[str, Any]:
    """Return every Celery setting that differs from its default."""
    broker, results = settings.broker, settings.results
    if broker.url is None:
        raise SettingsError("NEKRO_BROKER__URL is unset and no embedded Redis was resolved")
    results_url = results.url or broker.url
    if not is_redis(results_url):
        raise SettingsError(
            f"NEKRO_RESULTS__URL: {without_password(results_url)} is not a Redis URL; results need a Redis"
        )
    on_redis = is_redis(broker.url)
    return {
        **_broker_settings(settings, lane=lane),
        **_result_settings(settings),
        "task_queues": _queues(settings, quorum=not on_redis),
        "task_default_queue": Lane.METHODS.value,
        "task_create_missing_queues": False,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_publish_retry_policy": {
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0.2,
            "interval_max": 0.2,
        },
        # A worker connects again, instead of ending, to a Redis that refuses writes for a time (no memory, no
        # replica yet after a failover) and to a RabbitMQ that took back a call (its `consumer_timeout`).
        "broker_channel_error_retry": True,
        "worker_prefetch_multiplier": 1,
        "worker_consumer": "nekro.broker.celery.consumer:AnsweringConsumer",
        "worker_send_task_events": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_redirect_stdouts": False,
        "enable_utc": True,
    }


def _broker_settings(settings: Settings, *, lane: str | None) -> dict[str, Any]:
    broker = settings.broker
    assert broker.url is not None  # noqa: S101 - checked by celery_settings
    values: dict[str, Any] = {
        "broker_url": kombu_url(broker.url),
        "broker_connection_timeout": broker.connect_seconds,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
    }
    if not is_redis(broker.url):
        # Quorum queues keep their messages when a broker node fails; a confirmed message is in one.
        return values | {"broker_transport_options": {"confirm_publish": True}}
    endpoint = RedisEndpoint(broker, broker.url)
    options: dict[str, Any] = {
        "global_keyprefix": broker.key_prefix,
        "visibility_timeout": broker.visibility_timeout_seconds,
        "unacked_restore_interval": broker.visibility_timeout_seconds / 15,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": broker.visibility_timeout_seconds / 3,
        "socket_timeout": broker.socket_timeout_seconds,
        "socket_connect_timeout": broker.connect_seconds,
        "socket_keepalive": True,
        "health_check_interval": 10,
        # One list per queue: kombu uses one list per priority, and each lane needs only one.
        "priority_steps": [0],
        "endpoint": endpoint,
        **endpoint.sentinel_options,
    }
    if lane is not None:
        options |= Keys.unacked(lane)
    if endpoint.is_encrypted:
        values["broker_use_ssl"] = endpoint.tls
    return values | {"broker_transport_options": options}


def _result_settings(settings: Settings) -> dict[str, Any]:
    broker = settings.broker
    return {
        # The backend reads the URL of its Redis from our settings.
        "result_backend": BACKEND,
        "result_serializer": "json",
        "result_accept_content": ["json"],
        "result_expires": RESULT_SECONDS,
        # Otherwise a result is lost while Redis restarts, and its caller gets an error for a call
        # that has succeeded.
        "result_backend_always_retry": True,
        "result_backend_max_retries": RESULT_TRIES,
        "result_backend_max_sleep_between_retries_ms": 1000,
        "result_backend_transport_options": {
            "global_keyprefix": broker.key_prefix,
            "retry_policy": {
                "max_retries": 2,
                "interval_start": 0,
                "interval_step": 0.2,
                "interval_max": 0.5,
            },
            "additional_connection_errors": [
                "redis.exceptions.OutOfMemoryError",
                "broker_config.primaries.WritesRefusedError",
            ],
        },
        "redis_backend_health_check_interval": 10,
    }


def _queues(settings: Settings, *, quorum: bool) -> list[Queue]:
    pinned = (
        lane_queue(Lane.METHODS, plugin_key, quorum=quorum) for plugin_key in settings.workers.pinned_plugins
    )
    return [*(lane_queue(lane, quorum=quorum) for lane in Lane), *pinned]


def _reject_unknown(values: Iterable[str], known: Iterable[str], *, kind: str) -> None:
    known = frozenset(known)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingsError(f"unknown {kind} {name}{hint}")
