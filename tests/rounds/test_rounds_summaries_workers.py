"""Summaries written by real workers, with a model over HTTP: in the background, also after a crash."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, SeenRequest, complete, refuse
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet, build_fleet

from nekro.app import use_cases
from nekro.app.services import Services
from storage.repositories.chats import Summary
from storage.repositories.rounds import Round
from storage.states import FINAL_ROUND_STATES, RoundState

pytestmark = pytest.mark.extended

LEASE_SECONDS = 2
GROUP = "memory-model"


class MemoryModel:
    """Answers rounds in words; requests for summaries as the test says, by the chat that they name."""

    def __init__(self) -> None:
        self.rounds: list[str] = []
        self.summaries: list[str] = []
        #: Words of a chat's messages whose requests for a summary are kept open, or refused.
        self.held: set[str] = set()
        self.refused: set[str] = set()
        self.was_open: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._server = ChatServer([self._behave])
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> str:
        """Start unless it has, and forget what the other database's tests asked for."""
        for names in (self.held, self.refused, self.was_open):
            names.clear()
        if not self._thread.is_alive():
            self._thread.start()
            asyncio.run_coroutine_threadsafe(self._server.__aenter__(), self._loop).result(WAIT_SECONDS)
        return self._server.base_url

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.__aexit__(), self._loop).result(WAIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    async def _behave(self, writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        prompt = json.dumps(request.body["messages"], ensure_ascii=False)
        if request.body["model"] != GROUP:
            self.rounds.append(prompt)
            await complete("Noted.")(writer, request)
            return
        self.summaries.append(prompt)
        found = [word for word in sorted(self.held) if word in prompt]
        if found:
            self.was_open.update(found)
            await asyncio.Event().wait()
        if any(word in prompt for word in self.refused):
            await refuse(401, "no")(writer, request)
            return
        await complete(f"SUMMARY-{len(self.summaries)}")(writer, request)


@pytest.fixture(scope="module")
def model() -> Iterator[MemoryModel]:
    model = MemoryModel()
    yield model
    model.stop()


@pytest.fixture(scope="module", params=["postgres", pytest.param("sqlite", marks=pytest.mark.slow)])
def fleet(
    request: pytest.FixtureRequest,
    redis_server: Any,
    model: MemoryModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    url = f"sqlite:///{directory}/nekro.db"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_server").create_database()
    fleet = build_fleet(
        directory,
        redis_server.url,
        url,
        plugins={"dirs": (Path(__file__).parent / "plugins",)},
        llm={"base_url": model.start(), "model": "tests-1", "stream": False, "tries": 1},
        models={"memory": {"model": GROUP, "output_price": 3}},
        agent={"lease_seconds": LEASE_SECONDS, "history_messages": 4, "summary_group": "memory"},
        workers={"drain_seconds": 1},
    )
    fleet.start("methods", "rounds", "rounds")
    yield fleet
    fleet.stop()


async def turn(fleet: Fleet, services: Services, chat_key: str, text: str) -> Round:
    """Send a message, and return its round when it has ended."""
    message_id = await use_cases.receive_message(services, chat_key, text, user_id="ada", user_name="Ada")
    assert message_id is not None

    async def look() -> Round | None:
        async with services.database.read() as tx:
            (*_, last) = await tx.rounds.newest(chat_key, limit=50)
        return last if last.trigger_id == message_id and last.state in FINAL_ROUND_STATES else None

    found: Round = await eventually(look, what=fleet.waiting_for(f"the round of {text!r}"))
    return found


async def versions(services: Services, chat_key: str) -> list[Summary]:
    async with services.database.read() as tx:
        return await tx.summaries.versions(chat_key)


async def written(fleet: Fleet, services: Services, chat_key: str) -> list[Summary]:
    found: list[Summary] = await eventually(
        lambda: versions(services, chat_key), what=fleet.waiting_for(f"the summary of {chat_key}")
    )
    return found


async def test_workers_summarise_in_the_background_and_prompts_show_it(
    fleet: Fleet, model: MemoryModel
) -> None:
    services = fleet.services()
    await services.start()
    try:
        for number in range(3):
            assert (await turn(fleet, services, "plain", f"plain-{number}")).state is RoundState.DONE
        row = (await written(fleet, services, "plain"))[0]
        assert (row.model, row.group_name) == (f"{GROUP}-real", "memory")
        assert row.cost == pytest.approx(200 * 3 / 1_000_000) and row.prompt_tokens == 1000
        await turn(fleet, services, "plain", "plain-last")
        prompt = next(text for text in reversed(model.rounds) if "plain-last" in text)
        assert "<chat_summary until=" in prompt and "SUMMARY-" in prompt and "plain-0" not in prompt
    finally:
        await services.close()


async def test_a_model_that_hangs_or_refuses_delays_no_round(fleet: Fleet, model: MemoryModel) -> None:
    services = fleet.services()
    await services.start()
    model.held.add("slow-0")
    try:
        for number in range(3):
            assert (await turn(fleet, services, "slow", f"slow-{number}")).state is RoundState.DONE
        await eventually(lambda: "slow-0" in model.was_open, what=fleet.waiting_for("the open request"))
        for number in range(3, 6):
            assert (await turn(fleet, services, "slow", f"slow-{number}")).state is RoundState.DONE
        assert await versions(services, "slow") == []
        # The writer dies within its request; after its lease another one begins again.
        async with services.database.read() as tx:
            (lease,) = await tx.leases.held(prefix="summary.slow", limit=2)
        fleet.worker_of(lease.owner).kill()
        model.held.clear()
        await asyncio.to_thread(fleet.start, "rounds")

        async def next_turn() -> list[Summary]:
            await turn(fleet, services, "slow", "slow-again")
            return await versions(services, "slow")

        found = await eventually(next_turn, what=fleet.waiting_for("a summary after the crash"))
        assert [row.version for row in found][-1] == 1
    finally:
        model.held.clear()
        await services.close()


async def test_the_commands_show_the_summary_and_write_it_again(fleet: Fleet, model: MemoryModel) -> None:
    services = fleet.services()
    await services.start()
    try:
        for number in range(3):
            await turn(fleet, services, "shell", f"shell-{number}")
        await written(fleet, services, "shell")
    finally:
        await services.close()
    shown = fleet.run("history", "shell", "--summary")
    assert "version 1, " in shown.stdout and "SUMMARY-" in shown.stdout, shown
    done = fleet.run("models", "summarise", "shell", "--json")
    assert json.loads(done.stdout) == {"chat_key": "shell", "versions": 1}, done
    listed = json.loads(fleet.run("history", "shell", "--summary", "--json").stdout)
    assert [row["version"] for row in listed] == [2, 1]
    assert {row["group"] for row in listed} == {"memory"} and listed[0]["text"] != listed[1]["text"]
    assert fleet.run("models", "summarise", "no-such-chat").returncode != 0
    model.refused.add("shell-0")
    refused = fleet.run("models", "summarise", "shell")
    assert refused.returncode != 0 and "401" in refused.stderr
    assert [
        row["version"] for row in json.loads(fleet.run("history", "shell", "--summary", "--json").stdout)
    ] == [2, 1]
