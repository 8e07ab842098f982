"""Streams while gateways, workers, Redis and the database are killed: no gap and no repetition."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from event_reader import StreamReader
from gateway_process import GatewayProcess
from postgres_group import PostgresGroup
from redis_process import RedisServer
from waiting import eventually
from worker_fleet import Fleet, build_fleet

from nekro.app import use_cases
from nekro.app.chats.events import record
from nekro.app.services import Services
from nekro_agent.errors import NekroError
from storage.repositories.events import NewEvent

sys.path.insert(0, str(Path(__file__).parent.parent / "rounds"))

from scene_model import SceneModel

ROUNDS_PLUGINS = Path(__file__).parent.parent / "rounds" / "plugins"
PROGRAM = 'for n in range(8):\n    tick(f"{_ck} {n}")\nsend_msg_text(_ck, "done")'


@pytest.fixture
def gateways() -> Iterator[Callable[[Fleet, int], list[GatewayProcess]]]:
    """Start gateways of a fleet."""
    started: list[GatewayProcess] = []

    def start(fleet: Fleet, count: int) -> list[GatewayProcess]:
        started.extend(GatewayProcess(fleet) for _ in range(count))
        for gateway in started:
            gateway.start()
        for gateway in started:
            gateway.wait_ready()
        return started

    yield start
    for gateway in started:
        gateway.kill()


@contextlib.asynccontextmanager
async def opened(fleet: Fleet) -> AsyncIterator[Services]:
    services = fleet.services()
    await services.start()
    try:
        yield services
    finally:
        await services.close()


@contextlib.asynccontextmanager
async def reading(
    chats: Sequence[str], gateways: Sequence[GatewayProcess], *, per_chat: int
) -> AsyncIterator[list[StreamReader]]:
    """Read every chat with several readers, spread over the gateways."""
    readers = [
        StreamReader(
            chat,
            lambda: [gateway.url for gateway in gateways],
            headers=gateways[0].headers,
            connections=number,
        )
        for number in range(per_chat)
        for chat in chats
    ]
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    try:
        yield readers
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in ended} == {asyncio.CancelledError}


async def newest(services: Services, chats: Sequence[str]) -> dict[str, int]:
    async with services.database.read() as tx:
        return await tx.events.newest_numbers(chats)


async def require_everything(services: Services, readers: Sequence[StreamReader]) -> None:
    """Each reader has got every event of its chat once and in order."""
    last = await newest(services, sorted({reader.chat_key for reader in readers}))
    await eventually(
        lambda: all(reader.seen and reader.seen[-1] >= last[reader.chat_key] for reader in readers),
        what=lambda: f"the last events: {[(len(r.seen), last[r.chat_key], r.connections) for r in readers]}",
    )
    for reader in readers:
        assert reader.seen == list(range(1, last[reader.chat_key] + 1))


async def surely(action: Callable[[], Awaitable[object]]) -> None:
    """Do something that fails during an outage, until it succeeds."""
    while True:
        try:
            await action()
        except NekroError:
            await asyncio.sleep(0.2)
        else:
            return


async def add(services: Services, chat_key: str, count: int) -> None:
    async with services.database.begin() as tx:
        await tx.chats.ensure(chat_key)
        record(tx, services.publisher, chat_key, *(NewEvent(type="call.ended") for _ in range(count)))


@pytest.mark.extended
async def test_readers_lose_and_repeat_nothing_when_a_gateway_and_redis_are_killed(
    tmp_path: Path,
    own_redis: RedisServer,
    gateways: Callable[[Fleet, int], list[GatewayProcess]],
) -> None:
    fleet = await asyncio.to_thread(build_fleet, tmp_path, own_redis.url, f"sqlite:///{tmp_path}/nekro.db")
    serving = await asyncio.to_thread(gateways, fleet, 2)
    chats = [f"chat-{number}" for number in range(3)]
    async with opened(fleet) as services, reading(chats, serving, per_chat=4) as readers:

        async def write(rounds: int) -> None:
            for _ in range(rounds):
                for chat in chats:
                    await add(services, chat, 3)

        await write(10)
        await eventually(lambda: all(reader.seen for reader in readers), what="the readers")
        await asyncio.to_thread(serving[0].kill)
        await write(10)
        own_redis.kill()
        await write(10)
        await asyncio.to_thread(serving[0].start)
        await asyncio.to_thread(own_redis.start)
        await write(10)
        await require_everything(services, readers)
    assert any(reader.connections > 2 for reader in readers)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_readers_of_twenty_chats_survive_kills_of_everything_but_the_database(
    tmp_path: Path,
    own_redis: RedisServer,
    postgres_server: object,
    gateways: Callable[[Fleet, int], list[GatewayProcess]],
) -> None:
    model = SceneModel()
    base_url = model.start()
    chats = [f"chat-{number}" for number in range(20)]
    model.scenes.update({chat: [PROGRAM] for chat in chats})
    fleet = await asyncio.to_thread(
        build_fleet,
        tmp_path,
        own_redis.url,
        postgres_server.create_database(),  # type: ignore[attr-defined]
        plugins={"dirs": (ROUNDS_PLUGINS,)},
        llm={"base_url": base_url, "model": "tests-1"},
        agent={"lease_seconds": 2},
        workers={"drain_seconds": 1},
    )
    try:
        await asyncio.to_thread(fleet.start, "methods", "rounds", "rounds")
        serving = await asyncio.to_thread(gateways, fleet, 3)
        async with opened(fleet) as services, reading(chats, serving, per_chat=10) as readers:
            posting = asyncio.create_task(_post(services, chats, times=3))
            await _kill_repeatedly(fleet, serving, own_redis, times=9)
            await posting
            await eventually(lambda: _all_turns_ended(services, chats), what=fleet.waiting_for("the turns"))
            await require_everything(services, readers)
            await _require_one_end_per_turn(services, chats)
    finally:
        await asyncio.to_thread(fleet.stop)
        model.stop()


async def _post(services: Services, chats: Sequence[str], *, times: int) -> None:
    for _ in range(times):
        for chat in chats:
            text = f"scene:{chat}"
            await surely(
                lambda chat=chat, text=text: use_cases.receive_message(
                    services,  # type: ignore[misc]
                    chat,
                    text,
                    user_id="u",
                    user_name="U",
                )
            )
            await asyncio.sleep(0.3)


async def _kill_repeatedly(
    fleet: Fleet, serving: Sequence[GatewayProcess], redis: RedisServer, *, times: int
) -> None:
    """Kill a gateway, a rounds worker and Redis in turns, and start each again."""
    chosen = random.Random(7)
    for number in range(times):
        await asyncio.sleep(1)
        if number % 3 == 0:
            gateway = chosen.choice(serving)
            await asyncio.to_thread(gateway.kill)
            await asyncio.to_thread(gateway.start)
        elif number % 3 == 1:
            alive = [w for w in fleet.workers if w.lane == "rounds" and w.process.poll() is None]
            await asyncio.to_thread(chosen.choice(alive).kill)
            await asyncio.to_thread(fleet.start, "rounds")
        else:
            redis.kill()
            await asyncio.sleep(0.5)
            await asyncio.to_thread(redis.start)


async def _all_turns_ended(services: Services, chats: Sequence[str]) -> bool:
    async with services.database.read() as tx:
        return not any([await tx.rounds.open_turns(chat) for chat in chats])


async def _require_one_end_per_turn(services: Services, chats: Sequence[str]) -> None:
    for chat in chats:
        async with services.database.read() as tx:
            found = await tx.events.after(chat, number=0, limit=10_000)
        begun = sorted(str(event.turn_id) for event in found if event.type == "turn.started")
        ended = sorted(str(event.turn_id) for event in found if event.type == "turn.ended")
        assert begun == ended and len(begun) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["restart", "failover"])
async def test_readers_lose_and_repeat_nothing_when_the_database_restarts_or_fails_over(
    fault: str,
    tmp_path: Path,
    own_redis: RedisServer,
    gateways: Callable[[Fleet, int], list[GatewayProcess]],
) -> None:
    chats = [f"chat-{number}" for number in range(20)]
    with PostgresGroup(is_synchronous=True) as group:
        if fault == "failover":
            await asyncio.to_thread(group.add_standby)
        fleet = await asyncio.to_thread(build_fleet, tmp_path, own_redis.url, group.url)
        serving = await asyncio.to_thread(gateways, fleet, 2)
        async with opened(fleet) as services, reading(chats, serving, per_chat=10) as readers:
            is_over = asyncio.Event()

            async def write(chat: str) -> None:
                while not is_over.is_set():
                    await surely(lambda: add(services, chat, 2))
                    await asyncio.sleep(0.05)

            writers = [asyncio.create_task(write(chat)) for chat in chats]
            await eventually(lambda: all(reader.seen for reader in readers), what="the readers")
            group.primary.end(signal.SIGQUIT)
            if fault == "failover":
                await asyncio.to_thread(group.promote)
            else:
                await asyncio.to_thread(group.primary.start)
            before = max(len(reader.seen) for reader in readers)
            await eventually(
                lambda: all(len(reader.seen) > before + 20 for reader in readers),
                what="events after the fault",
            )
            is_over.set()
            await asyncio.gather(*writers)
            await require_everything(services, readers)


@pytest.mark.slow
async def test_readers_read_again_what_an_asynchronous_failover_has_replaced(
    tmp_path: Path, own_redis: RedisServer, gateways: Callable[[Fleet, int], list[GatewayProcess]]
) -> None:
    chats = [f"chat-{number}" for number in range(4)]
    with PostgresGroup() as group:
        await asyncio.to_thread(group.add_standby)
        fleet = await asyncio.to_thread(build_fleet, tmp_path, own_redis.url, group.url)
        serving = await asyncio.to_thread(gateways, fleet, 2)
        async with opened(fleet) as services, reading(chats, serving, per_chat=4) as readers:

            async def write(count: int, *among: str) -> None:
                for chat in among:
                    await surely(lambda chat=chat: add(services, chat, count))  # type: ignore[misc]

            await write(10, *chats)
            await eventually(lambda: all(len(reader.seen) == 10 for reader in readers), what="the readers")
            before = group.primary.execute("SELECT pg_current_wal_lsn()")[0][0]
            assert group.standby is not None
            standby = group.standby
            await eventually(
                lambda: standby.execute(
                    f"SELECT 1 FROM pg_last_wal_replay_lsn() AS at WHERE at >= '{before}'"
                ),
                what="the standby to have the first events",
            )
            await asyncio.to_thread(group.cut_off)
            await write(5, *chats[:3])  # lost in three of the chats
            await eventually(
                lambda: all(len(r.seen) == (10 if r.chat_key == chats[3] else 15) for r in readers),
                what="the events that will be lost",
            )
            group.primary.end(signal.SIGKILL)
            await asyncio.to_thread(group.promote)
            # As many, more, and none in the place of the lost ones.
            await write(5, chats[0])
            await write(9, chats[1])
            await eventually(
                lambda: all(r.losses for r in readers if r.chat_key != chats[3]), what="the news of the loss"
            )
            await write(3, *chats)
            await require_everything(services, readers)
    assert {r.chat_key: set(r.losses) for r in readers} == {
        **{chat: {0} for chat in chats[:3]},
        chats[3]: set(),
    }
