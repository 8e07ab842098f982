"""Properties whose value is built once for all threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from nekro.app.services import Services
from nekro.base.shared_property import shared_property
from workers.services import WorkerServices

THREADS = 8


class Owner:
    def __init__(self) -> None:
        self.built: list[object] = []

    @shared_property
    def value(self) -> object:
        """A value that takes time to build."""
        self.built.append(object())
        time.sleep(0.05)
        return self.built[-1]


def test_threads_that_ask_first_at_the_same_time_share_one_value() -> None:
    owner = Owner()
    all_there = threading.Barrier(THREADS)

    def ask() -> object:
        all_there.wait()
        return owner.value

    with ThreadPoolExecutor(THREADS) as pool:
        values = [each.result() for each in [pool.submit(ask) for _ in range(THREADS)]]
    assert len(owner.built) == 1 and set(values) == {owner.built[0]}
    assert owner.value is owner.built[0] and Owner().value is not owner.value
    assert Owner.value.__doc__ == "A value that takes time to build."


def test_no_service_of_a_process_is_built_twice() -> None:
    """Threads of pools and of the event loops ask for them; `functools.cached_property` has no lock."""
    built = {
        name: kind
        for name, kind in (vars(Services) | vars(WorkerServices)).items()
        if type(kind).__name__ in ("cached_property", "shared_property")
    }
    assert len(built) > 20
    assert {name for name, kind in built.items() if not isinstance(kind, shared_property)} == set()
