"""All Prometheus metrics of a worker or gateway.

A process has one set of metrics, ``metrics()``, as it has one logger, because the code that counts is
far from the code that serves them. Before ``start_metrics`` nothing is counted and the client library is
not imported, so commands and workers without an endpoint have no overhead.

Label values are names from the code and the settings (methods, lanes, error codes); none contains
text of a user, a chat or a model, and their number does not grow with the work done.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, Self, cast

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Metrics", "is_counting", "metrics", "start_metrics"]

#: Upper bounds of the buckets of every histogram, in seconds: from the fork of a sandbox to the longest
#: download.
_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200,
)  # fmt: skip

#: Upper bounds that OpenTelemetry's conventions for generative AI give, in tokens and in seconds.
_TOKEN_BUCKETS: Final = tuple(4**power for power in range(14))
_OPERATION_BUCKETS: Final = tuple(0.01 * 2**power for power in range(14))
_TURN_BUCKETS: Final = tuple(0.1 * 2**power for power in range(13))
#: Labels of a model request; the model is that of the settings, because the endpoint's name for it is a text
#: of others.
_REQUEST_LABELS: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class Metrics:
    """The metrics of one process; their help texts describe them."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        from prometheus_client.gc_collector import GCCollector
        from prometheus_client.platform_collector import PlatformCollector
        from prometheus_client.process_collector import ProcessCollector

        self.registry: CollectorRegistry = CollectorRegistry(auto_describe=True)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        counter = functools.partial(Counter, registry=self.registry)
        gauge = functools.partial(Gauge, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry, buckets=_BUCKETS)

        self.worker = gauge("nekro_worker_info", "Always 1; the labels name the worker.", ["lane", "worker"])
        self.calls = counter(
            "nekro_calls_total",
            "Calls of methods and jobs that ended on this worker; outcome: ok, duplicate, stopped, or an "
            "error code (method_failed: the method raised an exception).",
            ["method", "outcome"],
        )
        self.call_seconds = histogram("nekro_call_seconds", "Time from start to end of a call.", ["method"])
        self.call_wait_seconds = histogram(
            "nekro_call_wait_seconds",
            "Time from the publication of a call to its start on this worker.",
        )
        self.calls_in_flight = gauge("nekro_calls_in_flight", "Running tasks, including rounds.")
        self.calls_detached = counter(
            "nekro_calls_detached_total",
            "Calls whose caller stopped waiting; their results go to the chat.",
            ["method"],
        )
        self.messages_refused = counter(
            "nekro_messages_refused_total",
            "Messages that this worker refused: undecodable, unregistered, poisonous, …",
            ["reason"],
        )
        self.loop_blocked = counter(
            "nekro_loop_blocked_total", "How often a method blocked the event loop for long.", ["method"]
        )
        self.leases_lost = counter(
            "nekro_leases_lost_total",
            "Leases that passed to another process while this one was using them: delivery, call, chat, job, "
            "download, init, pinned, sweep, request, summary, worker.",
            ["lease"],
        )
        self.clock_offset_seconds = gauge(
            "nekro_clock_offset_seconds",
            "Seconds by which this host's clock is ahead of its peer's; negative means behind.",
            ["peer"],
        )
        self.rounds = counter(
            "nekro_rounds_total", "Rounds that ended on this worker.", ["state", "stop_type"]
        )
        self.round_seconds = histogram("nekro_round_seconds", "Time from start to end of a round.")
        self.model_requests = counter(
            "nekro_model_requests_total",
            "Requests of rounds and plugins to models, as this worker sent them.",
            ["group", "model"],
        )
        self.model_tokens = counter(
            "nekro_model_tokens_total",
            "Tokens of those requests; kind: prompt or answer.",
            ["group", "model", "kind"],
        )
        self.model_cost = counter(
            "nekro_model_cost_total",
            "Cost of those requests by the prices in the settings.",
            ["group", "model"],
        )
        self.sandbox_seconds = counter("nekro_sandbox_seconds_total", "Time for which code ran in sandboxes.")
        self.budget_refusals = counter(
            "nekro_budget_refusals_total",
            "Rounds, runs and requests that were refused because a budget was used up.",
            ["scope", "measure"],
        )
        self.budget_warnings = counter(
            "nekro_budget_warnings_total",
            "Chats that were warned of a budget that is nearly used up.",
            ["scope", "measure"],
        )
        self.sandbox_starts = counter(
            "nekro_sandbox_starts_total",
            "Runs by the origin of their sandbox: forked or cold (started by itself).",
            ["start"],
        )
        self.sandbox_start_seconds = histogram(
            "nekro_sandbox_start_seconds",
            "Time that a run waited for its sandbox.",
            ["start"],
        )
        self.sandbox_runs = counter("nekro_sandbox_runs_total", "Runs of code by stop type.", ["stop_type"])
        self._add_gen_ai(histogram)
        self._add_files(counter, gauge)
        self.http_requests = counter(
            "nekro_http_requests_total",
            "Requests that a gateway answered, by pattern of the route.",
            ["route", "method", "status"],
        )
        self.http_seconds = histogram(
            "nekro_http_request_seconds",
            "Time from the headers of a request to the end of its answer, or to the beginning of a stream.",
            ["route"],
        )
        self.http_in_flight = gauge(
            "nekro_http_requests_in_flight", "Requests in progress, including streams."
        )
        self.streams_open = gauge("nekro_streams_open", "Event streams that are open on this gateway.")
        self.stream_events = counter(
            "nekro_stream_events_total",
            "Events that this gateway sent to readers of event streams; kind: kept, live or change.",
            ["kind"],
        )
        self.stream_ends = counter(
            "nekro_stream_ends_total",
            "Event streams that ended; reason: left (the client), slow (it took no events), lost (the "
            "database has lost events), stopped (the gateway).",
            ["reason"],
        )
        self.plugin_http_requests = counter(
            "nekro_plugin_http_requests_total",
            "Requests to the routes and pages of plugins; status: 2xx to 5xx, or left (the client).",
            ["plugin", "status"],
        )
        self.plugin_http_seconds = histogram(
            "nekro_plugin_http_seconds",
            "Time from a request to a plugin's routes to the end of its answer.",
            ["plugin"],
        )
        self.webhook_deliveries = counter(
            "nekro_webhook_deliveries_total",
            "Attempts of this gateway to deliver an event to a webhook's URL; outcome: sent, failed (it will "
            "be repeated), dead (it will not).",
            ["outcome"],
        )

    def _add_files(self, counter: Any, gauge: Any) -> None:
        """Add the metrics of files in a store."""
        self.files_stored_bytes = counter(
            "nekro_files_stored_bytes_total", "Bytes that this process has put into the store of files."
        )
        self.files_fetched_bytes = counter(
            "nekro_files_fetched_bytes_total", "Bytes that this process has read from the store of files."
        )
        self.files_cache_reads = counter(
            "nekro_files_cache_reads_total",
            "Contents of files that were needed; result: hit (this host had them) or miss.",
            ["result"],
        )
        self.files_cache_bytes = gauge(
            "nekro_files_cache_bytes", "Bytes of the cache of files of this host when it was last measured."
        )
        self.files_damaged = counter(
            "nekro_files_damaged_total", "Contents that the store lacked or had altered when they were read."
        )
        self.files_collected = counter(
            "nekro_files_collected_total",
            "What this worker deleted from the store because no file has it; kind: contents, objects (those "
            "without a row) or bytes (of contents).",
            ["kind"],
        )

    def _add_gen_ai(self, histogram: Any) -> None:
        """Add the metrics of OpenTelemetry's conventions for generative AI, in Prometheus' spelling."""
        self.gen_ai_tokens = histogram(
            "gen_ai_client_token_usage",
            "Tokens of a model request; gen_ai_token_type: input or output.",
            [*_REQUEST_LABELS, "gen_ai_token_type"],
            buckets=_TOKEN_BUCKETS,
        )
        self.gen_ai_seconds = histogram(
            "gen_ai_client_operation_duration_seconds",
            'Time of a model request, one for each try; error_type: "" if it succeeded.',
            [*_REQUEST_LABELS, "error_type"],
            buckets=_OPERATION_BUCKETS,
        )
        self.gen_ai_first_chunk_seconds = histogram(
            "gen_ai_client_operation_time_to_first_chunk_seconds",
            "Time from a model request to the first piece of its streamed answer.",
            _REQUEST_LABELS,
            buckets=_OPERATION_BUCKETS,
        )
        self.gen_ai_tool_seconds = histogram(
            "gen_ai_execute_tool_duration_seconds",
            'Time from the request of a call to its answer, as its caller sees it; error_type: "" if it '
            "succeeded.",
            ["gen_ai_tool_name", "error_type"],
            buckets=_OPERATION_BUCKETS,
        )
        self.gen_ai_turn_seconds = histogram(
            "gen_ai_invoke_agent_duration_seconds",
            'Time from the request of a turn to its end; error_type: "" if it did not fail.',
            ["gen_ai_agent_name", "error_type"],
            buckets=_TURN_BUCKETS,
        )


class _Nothing:
    """Stands for every metric while metrics are off."""

    def __getattr__(self, name: str) -> Self:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Self:
        return self


_figures = cast(Metrics, _Nothing())


def metrics() -> Metrics:
    """Return the metrics of this process; before ``start_metrics`` an object that counts nothing."""
    return _figures


def is_counting() -> bool:
    """Whether metrics are on; for values that are expensive to determine."""
    return isinstance(_figures, Metrics)


def start_metrics() -> Metrics:
    """Turn metrics on for this process; idempotent."""
    global _figures
    if not isinstance(_figures, Metrics):
        _figures = Metrics()
    return _figures
