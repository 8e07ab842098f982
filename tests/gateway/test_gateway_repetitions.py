"""Messages that clients post until they have an answer, while they are cut and gateways are killed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
from gateway_process import GatewayProcess
from worker_fleet import Fleet

from storage.engine import Database

pytestmark = pytest.mark.extended

#: Each seed is another order of cuts.
SEED = 20
CHATS = 10


class Clients:
    """Clients that post each message until it is answered, cutting some of their connections."""

    def __init__(self, urls: list[str], key: Callable[[], str], *, cut: float) -> None:
        self._ports = [int(url.rpartition(":")[2]) for url in urls]
        self._key, self._cut = key, cut
        self._random = random.Random(SEED)
        self.cuts = 0
        self.posts = 0

    async def post(self, number: int) -> str:
        """Post a message under its idempotency key until it is answered; returns its turn."""
        body = json.dumps({"text": f"message {number}", "user_id": f"user-{number}"}).encode()
        head = (
            f"POST /api/v1/chats/chat-{number % CHATS}/messages HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nIdempotency-Key: message-{number}\r\n"
            f"Authorization: {self._key()}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        ).encode()
        while True:
            answer = await self._try(head + body)
            if answer is not None and answer[0] == 202:
                return str(answer[1]["turn_id"])
            assert answer is None or answer[0] in (409, 503), answer
            # A request of a gateway that was killed waits for the end of its lease.
            await asyncio.sleep(0.02 if answer is None else 0.5)

    async def _try(self, request: bytes) -> tuple[int, dict[str, str]] | None:
        """Send a request; None if it was cut, by this client or the gateway's end."""
        self.posts += 1
        port, is_cut = self._random.choice(self._ports), self._random.random() < self._cut
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                if is_cut:  # inside the request, or somewhere before the answer
                    self.cuts += 1
                    size = self._random.choice((self._random.randrange(len(request)), len(request)))
                    writer.write(request[:size])
                    await asyncio.sleep(self._random.random() * 0.05)
                    writer.transport.abort()
                    return None
                writer.write(request)
                return _parsed(await reader.read())
            finally:
                writer.close()
        return None


def _parsed(answer: bytes) -> tuple[int, dict[str, str]] | None:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        return None
    with suppress(ValueError):
        return int(head.split(b" ")[1]), json.loads(body)
    return None


def key_of(gateway: GatewayProcess) -> Callable[[], str]:
    """Return what reads the header with the local key, once the gateway has written it."""
    return lambda: gateway.headers["Authorization"]


async def post_all(
    count: int, urls: list[str], key: Callable[[], str], *, at_once: int
) -> tuple[Counter[str], Clients]:
    """Post messages, each by two clients; returns how often each turn was answered."""
    clients, slots = Clients(urls, key, cut=0.4), asyncio.Semaphore(at_once)

    async def one(number: int) -> list[str]:
        async with slots:
            return list(await asyncio.gather(clients.post(number), clients.post(number)))

    turns: Counter[str] = Counter()
    for answered in await asyncio.gather(*map(one, range(count))):
        assert len(set(answered)) == 1
        turns.update(set(answered))
    return turns, clients


async def require_one_turn_each(fleet: Fleet, turns: Counter[str], count: int) -> None:
    assert len(turns) == count
    assert set(turns.values()) == {1}
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    async with database.read() as transaction:
        run = transaction.connection.exec_driver_sql
        texts = [row[0] for row in await run("SELECT text FROM messages")]
        rounds = [row[0] for row in await run("SELECT turn_id FROM rounds")]
    await database.dispose()
    assert sorted(texts) == sorted(f"message {number}" for number in range(count))
    assert sorted(rounds) == sorted(turns)


async def test_messages_of_cut_clients_start_one_turn_each(fresh_fleet: Fleet) -> None:
    with GatewayProcess(fresh_fleet) as one, GatewayProcess(fresh_fleet) as two:
        turns, clients = await post_all(100, [one.url, two.url], key_of(one), at_once=10)
    assert clients.cuts > 20
    await require_one_turn_each(fresh_fleet, turns, 100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_thousand_messages_start_one_turn_each_while_gateways_are_killed(fresh_fleet: Fleet) -> None:
    gateway, killed = GatewayProcess(fresh_fleet), 0
    with GatewayProcess(fresh_fleet) as steady:
        posting = asyncio.create_task(post_all(1000, [steady.url, gateway.url], key_of(steady), at_once=20))
        while not posting.done():
            await asyncio.to_thread(gateway.__enter__)
            try:
                await asyncio.wait([posting], timeout=2)
                killed += 1
            finally:
                await asyncio.to_thread(gateway.kill)
        turns, clients = await posting
    assert killed >= 2 and clients.cuts > 200
    await require_one_turn_each(fresh_fleet, turns, 1000)
