"""Where the product relies on private API of Celery, kombu and billiard, as data that tests compare with it.

``tests/test_private_uses.py`` finds each use in the source, and fails when a use is missing here, when an
entry is no longer used, or when a library's class differs from the entry. The tests that an entry names show
what breaks when the library behaves differently. After a deliberate change of a use,
``python -m tests.private_uses MODULE`` prints what the source of a module says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["FORMATS", "USES", "Format", "Subclass", "Use"]


@dataclass(frozen=True, kw_only=True)
class Subclass:
    """A class of ours that derives from a library's class.

    Args:
        overrides: the members that it replaces, each with its parameters in the library's class, where ``=``
            marks a default; "attribute" for what is not a method.
        inherits: names of the library's class that it uses through ``self``, separated by spaces.
    """

    name: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    inherits: str = ""


@dataclass(frozen=True, kw_only=True)
class Use:
    """What one module of ours uses.

    Args:
        tests: at least one, as PATH::NAME.
        imports: undocumented names that it imports or names in a string, as MODULE[:NAME].
        private: names with an underscore that it uses of objects of the libraries.

    ``imports`` and ``private`` are separated by spaces.
    """

    module: str
    why: str
    tests: tuple[str, ...]
    imports: str = ""
    private: str = ""
    classes: tuple[Subclass, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Format:
    """A form of stored or sent data that a library defines and that we read or write ourselves."""

    what: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]


FORMATS: Final = (
    Format(
        what="message of kombu's virtual transports: JSON of body, headers, properties and delivery_info",
        modules=("nekro.broker.publishing", "nekro.broker.delivery.transport"),
        tests=("tests/pool/test_method_calls.py::test_pipelined_message_equals_that_of_kombu",),
    ),
    Format(
        what="held message in the hash of unacknowledged ones: [message, exchange, routing key]",
        modules=("nekro.broker.delivery.transport", "nekro.broker.delivery.handoff"),
        tests=(
            "tests/pool/test_deliveries.py::test_worker_killed_while_it_acknowledges_leaves_no_record_behind",
        ),
    ),
    Format(
        what="task message of Celery's protocol 2: names of its headers, body [args, kwargs, embed]",
        modules=("nekro.broker.celery.tasks", "workers.pools.asyncio_pool"),
        tests=(
            ("tests/security/test_security_unsigned_messages.py::test_unsigned_headers_have_no_effect"),
            (
                "tests/pool/test_fast_path.py::"
                "test_every_outcome_is_the_same_on_both_paths_and_every_method_runs_once"
            ),
        ),
    ),
    Format(
        what="record of a result: status, result with exc_type, exc_message and exc_module, traceback",
        modules=("nekro.broker.failures", "nekro.broker.celery.result_backend"),
        tests=("tests/pool/test_fast_path.py::test_a_success_leaves_the_same_keys_in_redis_as_celery",),
    ),
)

USES: Final = (
    Use(
        module="broker_config.app",
        why="Removes Celery's own tasks once the app is final, bounds the waits of its connections for "
        "sending, closes them at its end, and knows the names of Celery's settings.",
        tests=(
            "tests/workers/test_services_end.py::test_closed_services_leave_no_descriptor_open",
            "tests/security/test_security_unsigned_messages.py::test_no_app_has_celerys_built_in_tasks",
            "tests/broker/test_broker_app.py::test_every_setting_of_the_app_is_known_to_celery",
        ),
        imports="celery.app.defaults:SETTING_KEYS",
        classes=(
            Subclass(
                name="NekroApp",
                overrides={
                    "close": "(self)",
                    "connection_for_write": "(self, url=, **kwargs)",
                    "finalize": "(self, auto=)",
                },
                inherits="_pool _tasks amqp finalized",
            ),
        ),
    ),
    Use(
        module="nekro.broker.celery.consumer",
        why="Admits messages before Celery reads them, answers refused ones, acknowledges on task threads.",
        tests=(
            "tests/pool/test_deliveries.py::test_malformed_messages_stop_no_worker_and_delay_no_others",
            "tests/pool/test_loop_intake.py::test_unusual_messages_are_handled_by_the_consumer_with_the_usual_outcome",
        ),
        imports=(
            "celery.app.task:Context celery.worker.consumer:Consumer celery.worker:state "
            "kombu.transport:redis"
        ),
        private="_raw",
        classes=(
            Subclass(
                name="AnsweringConsumer",
                overrides={
                    "create_task_handler": "(self, promise=)",
                    "on_close": "(self)",
                    "call_soon_ack": "(self, p, *args, **kwargs)",
                    "on_send_event_buffered": "(self)",
                    "on_decode_error": "(self, message, exc)",
                    "on_invalid_task": "(self, body, message, exc)",
                    "on_unknown_task": "(self, body, message, exc)",
                },
                inherits=(
                    "_flush_events _maximum_prefetch_restored app connection_errors event_dispatcher hub "
                    "on_task_message pool restart_count strategies task_buckets task_consumer"
                ),
            ),
        ),
    ),
    Use(
        module="nekro.broker.celery.further_servers",
        why="Takes messages of further servers with the consumer of the first one.",
        tests=(
            "tests/pool/test_partitioned_calls.py::test_calls_are_answered_by_the_server_of_their_chat",
            "tests/pool/test_partitioned_calls.py::test_only_chats_of_a_server_that_is_down_wait",
        ),
        imports="celery.worker.consumer.tasks:Tasks",
    ),
    Use(
        module="nekro.broker.celery.names",
        why="Names that modules elsewhere need: steps of a worker, what it imports, loggers, modules of "
        "errors, the request of a call that no worker answers, and the deletion of a killed watcher's queue.",
        tests=(
            "tests/system/test_worker_template.py::test_a_forked_worker_imports_nothing_that_all_workers_need",
            "tests/rounds/test_rounds_watch.py::test_the_sweep_deletes_the_queues_of_killed_watchers_only",
            "tests/pool/test_method_calls.py::test_revoked_call_ends_with_an_error_for_its_caller",
            "tests/chaos/test_chaos_messages.py::"
            "test_29_cancelled_call_stays_cancelled_when_all_workers_restart",
            "tests/chaos/test_chaos_messages.py::test_unknown_outcomes_are_distinguished_from_failures",
            "tests/pool/test_pool_jobs.py::test_events_cover_every_task_without_its_arguments",
            "tests/system/test_observability.py::"
            "test_a_ready_worker_reports_ready_and_a_stopping_one_does_not",
            "tests/docs/test_commands_run.py::test_each_command_behaves_as_its_page_says",
        ),
        imports=(
            "celery.app.events celery.app.log celery.app.task:Context celery.app.trace celery.apps.worker "
            "celery.backends.base celery.fixups.django celery.loaders.app celery.platforms:SecurityWarning "
            "celery.worker.autoscale celery.worker.components:Pool "
            "celery.worker.consumer.control:Control celery.worker.consumer.delayed_delivery "
            "celery.worker.control celery.worker.strategy"
        ),
        private="_delete",
    ),
    Use(
        module="nekro.broker.celery.tasks",
        why="Signs what is sent, hides arguments, frees a waiting call's body, forgets producers.",
        tests=(
            "tests/pool/test_fast_path.py::test_unsupported_message_options_are_refused_by_the_sender",
            "tests/pool/test_pool_jobs.py::test_events_cover_every_task_without_its_arguments",
            "tests/workers/test_services_end.py::test_closed_services_leave_no_descriptor_open",
        ),
        imports=("celery.app.amqp:AMQP celery.utils.saferepr:saferepr celery.worker.request:Request"),
        private="_decoded_cache _raw",
        classes=(
            Subclass(
                name="PrivateAMQP",
                overrides={
                    "Connection": "attribute",
                    "as_task_v2": (
                        "(self, task_id, name, args=, kwargs=, countdown=, eta=, group_id=, "
                        "group_index=, expires=, retries=, chord=, callbacks=, errbacks=, reply_to=, "
                        "time_limit=, soft_time_limit=, create_sent_event=, root_id=, parent_id=, "
                        "shadow=, chain=, now=, timezone=, origin=, ignore_result=, argsrepr=, "
                        "kwargsrepr=, stamped_headers=, replaced_task_nesting=, **options)"
                    ),
                },
                inherits="_producer_pool app",
            ),
            Subclass(
                name="PrivateRequest",
                overrides={
                    "info": "(self, safe=)",
                },
                inherits="_Request__payload _args _body _message _payload _request_dict eventer",
            ),
            Subclass(
                name="PrivateTask",
                overrides={
                    "Request": "attribute",
                    "resultrepr_maxsize": "attribute",
                },
            ),
        ),
    ),
    Use(
        module="nekro.broker.celery.remote_control",
        why="Signs control commands, and carries out only those of a list, once.",
        tests=(
            (
                "tests/security/test_security_remote_control.py::"
                "test_unsigned_commands_have_no_effect_and_no_answer"
            ),
            (
                "tests/security/test_security_remote_control.py::"
                "test_a_recorded_command_is_executed_once_and_not_altered"
            ),
        ),
        imports=(
            "celery.app.control:Control celery.utils.collections:LimitedSet kombu.pidbox:Mailbox "
            "kombu.pidbox:Node"
        ),
        private="_publish",
        classes=(
            Subclass(
                name="SignedNode",
                overrides={
                    "__init__": "(self, hostname, state=, channel=, handlers=, mailbox=)",
                    "handle_message": "(self, body, message=)",
                    "on_decode_error": "(self, message, exc)",
                },
                inherits="handlers mailbox",
            ),
            Subclass(
                name="SignedMailbox",
                overrides={
                    "node_cls": "attribute",
                    "accept": "attribute",
                    "_publish": (
                        "(self, type, arguments, destination=, reply_ticket=, channel=, timeout=, "
                        "serializer=, producer=, pattern=, matcher=)"
                    ),
                },
                inherits="connection producer_or_acquire",
            ),
            Subclass(
                name="SignedControl",
                overrides={
                    "Mailbox": "attribute",
                    "__init__": "(self, app=)",
                },
                inherits="app mailbox",
            ),
        ),
    ),
    Use(
        module="nekro.broker.celery.result_backend",
        why="Stores a result, answers its caller and ends its delivery in one script; repeats failures.",
        tests=(
            "tests/broker/test_results_backend.py::test_result_is_stored_and_announced_to_its_caller",
            "tests/broker/test_results_backend.py::test_storing_is_retried_when_redis_returns",
        ),
        imports=(
            "celery.backends.redis:RedisBackend kombu.utils.encoding:bytes_to_str "
            "kombu.utils.encoding:str_to_bytes"
        ),
        private="_sleep _store_result",
        classes=(
            Subclass(
                name="ReplyBackend",
                overrides={
                    "__init__": (
                        "(self, host=, port=, db=, password=, max_connections=, url=, connection_pool=, "
                        "**kwargs)"
                    ),
                    "as_uri": "(self, include_password=)",
                    "on_task_call": "(self, producer, task_id)",
                    "_store_result": "(self, task_id, result, state, traceback=, request=, **kwargs)",
                    "_set": "(self, key, value, expires=)",
                    "_sleep": "(self, amount)",
                },
                inherits=(
                    "_MAX_STR_VALUE_SIZE _get_result_meta app client connparams encode expires "
                    "failure_expires get_key_for_task url"
                ),
            ),
        ),
    ),
    Use(
        module="nekro.broker.celery.worker",
        why=(
            "Celery has no public way to ask whether the worker stops, or to revoke in this process only; "
            "the lock of its signal is replaced by a reentrant one. Task events are buffered, and "
            "sent only while they are watched."
        ),
        tests=(
            "tests/docs/test_commands_run.py::test_each_command_behaves_as_its_page_says",
            (
                "tests/chaos/test_chaos_messages.py::"
                "test_29_cancelled_call_stays_cancelled_when_all_workers_restart"
            ),
            (
                "tests/long/test_long_pinned.py::"
                "test_after_the_owner_is_killed_another_worker_continues_counting"
            ),
            "tests/system/test_shutdown.py::test_a_stop_signal_may_interrupt_the_handler_of_another",
            "tests/pool/test_fast_path.py::test_an_event_receiver_gets_the_events_of_a_call_and_its_result",
        ),
        imports=(
            "celery.app.events:Events celery.events.dispatcher:EventDispatcher celery.platforms:EX_FAILURE "
            "celery.worker:state"
        ),
        classes=(
            Subclass(
                name="BufferingDispatcher",
                overrides={
                    "__init__": (
                        "(self, connection=, hostname=, enabled=, channel=, buffer_while_offline=, app=, "
                        "serializer=, groups=, delivery_mode=, buffer_group=, buffer_limit=, "
                        "on_send_buffered=)"
                    ),
                    "send": "(self, type, blind=, utcoffset=, retry=, retry_policy=, Event=, **fields)",
                },
                inherits="_group_buffer buffer_limit",
            ),
            Subclass(
                name="BufferingEvents",
                overrides={
                    "dispatcher_cls": "attribute",
                },
            ),
        ),
    ),
    Use(
        module="nekro.broker.delivery.connection",
        why="Selects the transport; reads no compressed message of RabbitMQ, and bounds waits for it.",
        tests=(
            "tests/chaos/test_chaos_rabbitmq.py::test_threads_that_wait_for_a_frozen_server_end",
            "tests/chaos/test_chaos_rabbitmq.py::test_calls_of_every_type_come_back",
            "tests/security/test_security_unsigned_messages.py::test_bodies_in_other_encodings_are_refused",
        ),
        imports="kombu.transport:pyamqp kombu.transport:redis",
        private="_info",
        classes=(
            Subclass(
                name="PlainAmqpMessage",
                overrides={
                    "__init__": "(self, msg, channel=, **kwargs)",
                },
            ),
            Subclass(
                name="PlainAmqpChannel",
                overrides={
                    "Message": "attribute",
                },
            ),
            Subclass(
                name="PlainAmqpConnection",
                overrides={
                    "Channel": "attribute",
                    "__init__": (
                        "(self, host=, userid=, password=, login_method=, login_response=, "
                        "authentication=, virtual_host=, locale=, client_properties=, ssl=, "
                        "connect_timeout=, channel_max=, frame_max=, heartbeat=, on_open=, on_blocked=, "
                        "on_unblocked=, confirm_publish=, on_tune_ok=, read_timeout=, write_timeout=, "
                        "socket_settings=, frame_handler=, frame_writer=, **kwargs)"
                    ),
                    "drain_events": "(self, timeout=)",
                },
            ),
            Subclass(
                name="PlainAmqpTransport",
                overrides={
                    "Connection": "attribute",
                },
            ),
            Subclass(
                name="PlainAmqpTlsTransport",
                overrides={
                    "Connection": "attribute",
                },
            ),
            Subclass(
                name="PooledAmqpConnection",
                overrides={
                    "get_transport_cls": "(self)",
                },
            ),
            Subclass(
                name="AmqpConnectionPool",
                overrides={
                    "new": "(self)",
                },
                inherits="connection",
            ),
            Subclass(
                name="ClaimConnection",
                overrides={
                    "Pool": "(self, limit=, **kwargs)",
                    "get_transport_cls": "(self)",
                },
            ),
        ),
    ),
    Use(
        module="nekro.broker.delivery.intake",
        why="Takes messages on the pool's loop in the order of kombu's channel.",
        tests=(
            "tests/pool/test_loop_intake.py::test_two_queues_are_served_alternately",
            "tests/pool/test_handoff.py::test_storing_a_result_acknowledges_its_delivery",
        ),
        imports="kombu.utils.encoding:bytes_to_str",
        private="_delivered _dirty _queue_cycle",
    ),
    Use(
        module="nekro.broker.delivery.leases",
        why="Renews, requeues and drops the held messages of lost channels.",
        tests=("tests/pool/test_deliveries.py::test_lost_connection_runs_no_task_twice",),
        imports="celery.worker.consumer.tasks:Tasks celery.worker:state",
        private="_disconnect_pools _quick_ack",
    ),
    Use(
        module="nekro.broker.delivery.orphans",
        why="Answers the caller of a call whose worker has ended, as Celery's tracer reports a failure.",
        tests=("tests/cli/test_cli_dead_workers.py::test_a_call_that_ends_its_worker_fails_with_an_error",),
        imports="celery.app.task:Context",
    ),
    Use(
        module="nekro.broker.delivery.transport",
        why="Claims messages atomically and with leases, where kombu pops and then records them.",
        tests=(
            "tests/pool/test_deliveries.py::test_message_that_meets_a_dying_idle_worker_is_not_lost",
            "tests/pool/test_deliveries.py::test_worker_and_its_tasks_survive_a_restart_of_redis",
            (
                "tests/broker/test_redis_endpoint.py::"
                "test_a_blocking_pop_ends_as_a_lost_connection_when_its_server_is_demoted"
            ),
        ),
        imports=(
            "kombu.transport:redis kombu.transport:virtual kombu.utils.encoding:bytes_to_str "
            "kombu.utils.json:dumps kombu.utils.json:loads"
        ),
        private=(
            "_connparams _deliver _delivered _dirty _do_restore_message _get_pool _receive_one "
            "_remove_from_indices"
        ),
        classes=(
            Subclass(
                name="ClaimQoS",
                overrides={
                    "can_consume": "(self)",
                    "can_consume_max_estimate": "(self)",
                    "append": "(self, message, delivery_tag)",
                    "ack": "(self, delivery_tag)",
                    "reject": "(self, delivery_tag, requeue=)",
                    "restore_unacked_once": "(self, stderr=)",
                    "restore_visible": "(self, start=, num=, interval=)",
                    "restore_by_tag": "(self, tag, client=, leftmost=)",
                },
                inherits=(
                    "_delivered _dirty _on_collect _remove_from_indices channel unacked_key "
                    "unacked_mutex_expire unacked_mutex_key visibility_timeout"
                ),
            ),
            Subclass(
                name="ClaimMessage",
                overrides={
                    "__init__": "(self, payload, channel=, **kwargs)",
                },
                inherits="_decoded_cache content_type",
            ),
            Subclass(
                name="ClaimChannel",
                overrides={
                    "QoS": "attribute",
                    "Message": "attribute",
                    "from_transport_options": "attribute",
                    "_in_poll": "attribute",
                    "__init__": "(self, *args, **kwargs)",
                    "close": "(self)",
                    "_get_pool": "(self, asynchronous=)",
                    "_connparams": "(self, asynchronous=)",
                    "_receive_one": "(self, c)",
                    "_brpop_start": "(self, timeout=)",
                    "_brpop_read": "(self, **options)",
                },
                inherits=(
                    "_brpop_sent_at _closing _flush_brpop_reauth _queue_cycle active_queues brpop_timeout "
                    "client conn_or_acquire connection connection_class connection_class_ssl "
                    "connection_errors global_keyprefix qos visibility_timeout"
                ),
            ),
            Subclass(
                name="ClaimTransport",
                overrides={
                    "Channel": "attribute",
                },
            ),
        ),
    ),
    Use(
        module="workers.pools.asyncio_pool",
        why="Runs tasks as coroutines, and calls that succeed without Celery's tracer.",
        tests=("tests/pool/test_fast_path.py::test_a_success_leaves_the_same_keys_in_redis_as_celery",),
        private="_get_info",
        classes=(
            Subclass(
                name="AsyncioPool",
                overrides={"on_start": "(self)", "_get_info": "(self)"},
                inherits="app limit",
            ),
        ),
    ),
    Use(
        module="workers.pools.base",
        why="A pool of our own: limits, shutdown, and acknowledgements while the hub's thread waits.",
        tests=(
            "tests/pool/test_pool_jobs.py::test_sigquit_gives_running_tasks_back_to_the_queue",
            "tests/pool/test_pool_jobs.py::test_drain_time_bounds_a_warm_shutdown",
        ),
        imports=(
            "celery.concurrency.base:BasePool celery.concurrency.prefork:_run_ready_callbacks "
            "kombu.asynchronous:get_event_loop"
        ),
        private="_get_info",
        classes=(
            Subclass(
                name="JobPool",
                overrides={
                    "signal_safe": "attribute",
                    "body_can_be_buffer": "attribute",
                    "__init__": (
                        "(self, limit=, putlocks=, forking_enable=, callbacks_propagate=, app=, **options)"
                    ),
                    "start": "(self)",
                    "on_apply": "(self, *args, **kwargs)",
                    "terminate_job": "(self, pid, signal=)",
                    "on_stop": "(self)",
                    "on_terminate": "(self)",
                    "flush": "(self)",
                    "_get_info": "(self)",
                },
                inherits="_does_debug app limit options",
            ),
        ),
    ),
    Use(
        module="workers.pools.jobs",
        why="Runs Celery's tracer for a job, and reports errors as its pools do.",
        tests=("tests/pool/test_pool_jobs.py::test_hard_limit_fails_a_task_and_frees_its_slot",),
        imports="billiard.einfo:ExceptionInfo celery.concurrency.base:apply_target",
    ),
)
