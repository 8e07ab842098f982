"""The peer Ray: an asynchronous actor in a process of its own, called over Ray's own protocol, without Redis.

No queue that outlives its processes: the call of an actor that dies is lost.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

from benchmarks.harness.contender import CALL_SECONDS, TEXT, AsyncClient, Contender, Setup, check, probe

__all__ = ["CONTENDER", "RayClient"]

_AT_ONCE = 100
_STORE_BYTES = 100 << 20
_RETRY_SECONDS = 0.05


def _worker_commands(setup: Setup) -> list[list[str]]:
    head = ["--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(setup.http_port)]
    node = ["--num-cpus", str(setup.workers), "--object-store-memory", str(_STORE_BYTES)]
    quiet = ["--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", setup.directory]
    return [[sys.executable, "-m", "ray.scripts.scripts", "start", *head, *node, *quiet]]


class RayClient(AsyncClient):
    """An ``await`` of each call's reference; several workers are several actors, which take turns."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        super().__init__()

    async def open(self) -> None:
        import ray

        self._ray: Any = ray

    def first(self) -> None:
        """Connect as soon as the head node answers, start the actors, and call one."""
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                self._ray.init(
                    address=f"127.0.0.1:{self._setup.http_port}",
                    _node_ip_address="127.0.0.1",
                    log_to_driver=False,
                    logging_level="ERROR",
                )
                break
            except (ConnectionError, RuntimeError, ValueError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)

        class Probe:
            async def probe(self, number: int, text: str) -> dict[str, Any]:
                return await probe(number, text)

        remote = self._ray.remote(num_cpus=1, max_concurrency=_AT_ONCE)(Probe)
        actors = [remote.remote() for _ in range(self._setup.workers)]
        for actor in actors:
            check(0, self._ray.get(actor.probe.remote(0, TEXT), timeout=CALL_SECONDS))
        self._actors = itertools.cycle(actors)

    async def shut(self) -> None:
        self._ray.shutdown()

    async def call(self, number: int) -> object:
        return await next(self._actors).probe.remote(number, TEXT)


CONTENDER = Contender(
    name="ray",
    about=f"Ray, an asynchronous actor with {_AT_ONCE} calls at once per worker, on one node without Redis",
    modules=("ray",),
    worker_commands=_worker_commands,
    open_client=RayClient,
    environment=lambda setup: {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    },
    install="pip install ray",
)
