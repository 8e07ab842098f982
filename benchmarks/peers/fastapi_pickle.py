"""The peer FastAPI: plugins in the server's process, on one uvicorn process, pickled bodies, ``requests``.

The design of the reference's RPC: no queue, no durability, no second worker; and the server unpickles
what its callers send, which this project never does.
"""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.harness.contender import CALL_SECONDS, TEXT, Client, Contender, Latencies, Setup, check, probe
from benchmarks.harness.worker import worker_command

if TYPE_CHECKING:
    import requests

__all__ = ["PLAIN", "SESSION", "FastAPIClient", "create_app", "run_worker"]

_RETRY_SECONDS = 0.01


def create_app() -> Any:
    """Build the server: one route that unpickles, awaits the method and pickles."""
    from fastapi import FastAPI, Request, Response

    app = FastAPI()

    async def call(request: Request) -> Response:
        args, kwargs = pickle.loads(await request.body())
        return Response(pickle.dumps(await probe(*args, **kwargs)), media_type="application/octet-stream")

    # The annotations are strings that refer to local names of this function, so they are replaced.
    call.__annotations__ = {"request": Request, "return": Response}
    app.post("/rpc/probe", response_model=None)(call)
    return app


def run_worker(setup: Setup) -> None:
    """Serve until a signal ends it."""
    import uvicorn

    uvicorn.run(create_app(), host="127.0.0.1", port=setup.http_port, access_log=False, log_level="warning")


class FastAPIClient(Client):
    """``requests``, with a session per thread or (as generated stubs do) with a bare ``post``."""

    def __init__(self, setup: Setup, *, session: bool) -> None:
        self._url = f"http://127.0.0.1:{setup.http_port}/rpc/probe"
        self._session = session
        self._local = threading.local()
        self._threads: ThreadPoolExecutor | None = None

    def first(self) -> None:
        import requests

        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return check(0, self.call(0))
            except requests.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)

    def call(self, number: int) -> object:
        """Post one call and unpickle its answer."""
        response = self._poster().post(
            self._url, data=pickle.dumps(((number, TEXT), {})), timeout=CALL_SECONDS
        )
        response.raise_for_status()
        return pickle.loads(response.content)

    def sequential(self, calls: int, *, warm_up: int) -> Latencies:
        latencies = []
        for number in range(warm_up + calls):
            began = perf_counter()
            answer = self.call(number)
            latencies.append(perf_counter() - began)
            check(number, answer)
        return latencies[warm_up:]

    def flood(self, calls: int, *, in_flight: int) -> float:
        def checked(number: int) -> None:
            check(number, self.call(number))

        threads = self._threads_for(in_flight)
        began = perf_counter()
        for done in [threads.submit(checked, number) for number in range(calls)]:
            done.result(CALL_SECONDS)
        return perf_counter() - began

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def _threads_for(self, in_flight: int) -> ThreadPoolExecutor:
        # Kept from the warm-up on, with the sessions of the threads, so that connecting is not measured.
        if self._threads is None:
            self._threads = ThreadPoolExecutor(in_flight)
        return self._threads

    def _poster(self) -> requests.Session | Any:
        import requests

        if not self._session:
            return requests
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        return self._local.session


SESSION = Contender(
    name="fastapi-session",
    about="FastAPI in one uvicorn process, pickled bodies, requests.Session (one per thread)",
    modules=("fastapi", "uvicorn", "requests"),
    worker_commands=lambda setup: [worker_command(__name__)],
    open_client=lambda setup: FastAPIClient(setup, session=True),
)

PLAIN = Contender(
    name="fastapi-plain",
    about="the same, requests.post without a session: a connection per call",
    modules=("fastapi", "uvicorn", "requests"),
    worker_commands=lambda setup: [worker_command(__name__)],
    open_client=lambda setup: FastAPIClient(setup, session=False),
)
