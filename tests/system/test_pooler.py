"""A fleet whose workers reach PostgreSQL through pgbouncer in transaction mode."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pgbouncer_process import PgBouncer, needs_pgbouncer
from waiting import WAIT_SECONDS, eventually

from nekro.app import use_cases
from nekro.app.services import Services
from nekro_agent.ports import MessageKind
from storage.states import RoundState

pytestmark = [pytest.mark.extended, needs_pgbouncer]

#: Connections of the pooler to PostgreSQL; the processes here open several times as many to the pooler.
SERVERS = 4
CALLS = 300
CHATS = 10
SCRIPT = """
- when: '(?s)count to 2'
  answer: |
    ```python
    remember("a note")
    count_up(0)
    ```
- when: "'next': 1}"
  answer: |
    ```python
    count_up(1)
    ```
- when: "'next': 2}"
  answer: |
    ```python
    send_msg_text(_ck, "counted to 2")
    ```
"""


@pytest.fixture(scope="module")
def postgres_url(new_database: Callable[[str, Path], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The database, past the pooler."""
    return new_database("postgres", tmp_path_factory.mktemp("database"))


@pytest.fixture(scope="module")
def database_url(postgres_url: str) -> Iterator[str]:
    """The same database through the pooler."""
    with PgBouncer(postgres_url, default_pool_size=SERVERS) as pooler:
        yield pooler.url(pool_mode="transaction")


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = tmp_path_factory.mktemp("llm") / "script.yaml"
    script.write_text(SCRIPT)
    system = make_fleet(llm={"script": script}, agent={"lease_seconds": 3})
    system.start("methods", "methods", "rounds", "rounds", concurrency=8)
    return system


async def test_calls_run_once_each_over_few_server_connections(services: Services, postgres_url: str) -> None:
    gate = asyncio.Semaphore(50)

    async def one(number: int) -> None:
        async with gate:
            await use_cases.invoke(
                services, "remember", [f"n{number}"], {}, chat_key=f"c{number % CHATS}", user_id="u",
                timeout_seconds=WAIT_SECONDS,
            )  # fmt: skip

    await asyncio.gather(*(one(number) for number in range(CALLS)))
    journal = services.areas.plugin_dir("tests.probe") / "journal.txt"
    ran = Counter(line for line in journal.read_text().splitlines() if line.startswith("remember n"))
    assert ran == {f"remember n{number}": 1 for number in range(CALLS)}
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        cursor = await connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )
        row = await cursor.fetchone()
    assert row is not None and 0 < row[0] <= SERVERS


async def test_turns_of_several_chats_end(services: Services, fleet: Any) -> None:
    chats = [f"turn {number}" for number in range(CHATS)]
    for chat_key in chats:
        await use_cases.receive_message(
            services, chat_key, "please count to 2", user_id="u1", user_name="Ada"
        )

    async def are_over() -> bool:
        async with services.database.read() as tx:
            found = [round_ for chat in chats for round_ in await tx.rounds.newest(chat, limit=9)]
        return len(found) == 3 * CHATS and {round_.state for round_ in found} == {RoundState.DONE}

    await eventually(are_over, what=fleet.waiting_for("three rounds in each chat"))
    async with services.database.read() as tx:
        for chat_key in chats:
            messages = await tx.messages.newest(chat_key, limit=50)
            said = [message.text for message in messages if message.kind is MessageKind.ASSISTANT]
            assert said == ["counted to 2"]
