"""Every figure of a worker that Prometheus reads, in one place.

A process has one set of figures, ``metrics()``, as it has one logger: what counts is far
from what serves. Until ``start_metrics`` they count nothing and the client library is not
imported: commands, and workers without an endpoint, pay nothing.

Labels are names from the code and the settings (methods, lanes, error codes); none holds
what a user, a chat or a model wrote, and none grows with the work done.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, Self, cast

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Metrics", "is_counting", "metrics", "start_metrics"]

#: From a millisecond to the longest download.
_CALL_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200,
)  # fmt: skip
_WAIT_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_ROUND_SECONDS: Final = (0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_START_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """The figures of one process; their help texts say what they count."""

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
        histogram = functools.partial(Histogram, registry=self.registry)

        self.worker = gauge("nekro_worker_info", "Always 1; the labels say who this is.", ["lane", "worker"])
        self.calls = counter(
            "nekro_calls_total",
            "Calls of methods and jobs that ended here; outcome: ok, duplicate, stopped, or the "
            "code of an error (method_failed: the method raised one).",
            ["method", "outcome"],
        )
        self.call_seconds = histogram(
            "nekro_call_seconds", "From start to end of a call.", ["method"], buckets=_CALL_SECONDS
        )
        self.call_wait_seconds = histogram(
            "nekro_call_wait_seconds",
            "From a call's sending to its start here.",
            buckets=_WAIT_SECONDS,
        )
        self.calls_in_flight = gauge("nekro_calls_in_flight", "Tasks that run now, rounds included.")
        self.calls_detached = counter(
            "nekro_calls_detached_total",
            "Calls that outlived their caller's patience and report back later.",
            ["method"],
        )
        self.messages_refused = counter(
            "nekro_messages_refused_total",
            "Messages that this worker could not run: undecodable, unregistered, poisonous, …",
            ["reason"],
        )
        self.loop_blocked = counter(
            "nekro_loop_blocked_total", "Times that a method blocked the event loop for long.", ["method"]
        )
        self.leases_lost = counter(
            "nekro_leases_lost_total",
            "Leases that passed to another worker while this one worked: delivery, call, chat, job, download,"
            " init, pinned.",
            ["lease"],
        )
        self.clock_offset_seconds = gauge(
            "nekro_clock_offset_seconds",
            "By how many seconds this host's clock is ahead of its peer's; negative: behind.",
            ["peer"],
        )
        self.rounds = counter("nekro_rounds_total", "Rounds that ended here.", ["state", "stop_type"])
        self.round_seconds = histogram(
            "nekro_round_seconds", "From a round's start to its end.", buckets=_ROUND_SECONDS
        )
        self.sandbox_starts = counter(
            "nekro_sandbox_starts_total",
            "Runs by where their sandbox came from: warm (it waited) or cold (started for the run).",
            ["start"],
        )
        self.sandbox_start_seconds = histogram(
            "nekro_sandbox_start_seconds",
            "How long a run waited for its sandbox.",
            ["start"],
            buckets=_START_SECONDS,
        )
        self.sandbox_runs = counter(
            "nekro_sandbox_runs_total", "Runs of code by how they ended.", ["stop_type"]
        )


class _Nothing:
    """Stands for every figure while nobody looks."""

    def __getattr__(self, name: str) -> Self:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Self:
        return self


_figures = cast(Metrics, _Nothing())


def metrics() -> Metrics:
    """The figures of this process."""
    return _figures


def is_counting() -> bool:
    """Whether anybody counts, for what is dear to find out."""
    return isinstance(_figures, Metrics)


def start_metrics() -> Metrics:
    """Count from now on; once per process."""
    global _figures
    if not isinstance(_figures, Metrics):
        _figures = Metrics()
    return _figures
