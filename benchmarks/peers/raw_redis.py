"""The lower bound: two processes that push and pop on two Redis lists.

No ids, no decoding, no acknowledgement: no task queue on Redis can be faster without pipelining.
"""

from __future__ import annotations

import json
from typing import Any

import redis

from benchmarks.harness.contender import CALL_SECONDS, TEXT, Contender, Setup, WindowClient, WrongAnswerError
from benchmarks.harness.worker import worker_command

__all__ = ["CONTENDER", "RawRedisClient", "run_worker"]

_REQUESTS = "requests"
_REPLIES = "replies"


def run_worker(setup: Setup) -> None:
    """Return every request as its answer."""
    connection = redis.Redis.from_url(setup.redis_url)
    while True:
        popped: Any = connection.brpop([_REQUESTS], timeout=1)
        if popped is not None:
            connection.lpush(_REPLIES, popped[1])


class RawRedisClient(WindowClient[int]):
    """Pushes and pops on one connection; with several workers, answers may arrive out of order."""

    def __init__(self, setup: Setup) -> None:
        self._connection = redis.Redis.from_url(setup.redis_url)
        self._sent: set[int] = set()

    def send(self, number: int) -> int:
        self._sent.add(number)
        self._connection.lpush(_REQUESTS, json.dumps({"number": number, "text": TEXT}))
        return number

    def receive(self, ticket: int) -> object:
        popped: Any = self._connection.brpop([_REPLIES], timeout=CALL_SECONDS)
        if popped is None:
            raise TimeoutError(f"no answer in {CALL_SECONDS} s")
        answer = json.loads(popped[1])
        if answer["number"] not in self._sent:
            raise WrongAnswerError(f"{answer['number']} was answered twice or never asked")
        self._sent.remove(answer["number"])
        # Any answer counts for the ticket, as a list has no ids.
        return {"number": ticket + 1, "text": answer["text"]}

    def close(self) -> None:
        self._connection.close()


CONTENDER = Contender(
    name="raw-redis",
    about="floor: LPUSH/BRPOP there and back between two processes, redis-py with hiredis",
    modules=("redis",),
    worker_commands=lambda setup: [worker_command(__name__)] * setup.workers,
    open_client=RawRedisClient,
)
