"""Plugins in the style of published ones that use chats, people, models and helpers, through the queue."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from chat_server import ChatServer, SeenRequest, complete, refuse, respond
from queue_world import QueueSystem, QueueWorld
from waiting import WAIT_SECONDS
from worker_fleet import Worker

from nekro_agent.errors import NekroError
from nekro_agent.models.db_chat_message import DBChatMessage
from nekro_agent.models.db_user import DBUser

HOME = Path(__file__).parent / "home_data"
GROUP = "onebot_v11-group_123"
KEY = "sk-secret-of-the-draw-endpoint"


class ModelServer:
    """A real endpoint in a thread of the test's process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = ChatServer([self._behave])
        asyncio.run_coroutine_threadsafe(self.server.__aenter__(), self._loop).result(WAIT_SECONDS)

    async def _behave(self, writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        if request.path.endswith("/embeddings"):
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
            body = {
                "object": "list",
                "model": "m",
                "data": data,
                "usage": {"prompt_tokens": 1, "total_tokens": 1},
            }
            return await respond(200, body)(writer, request)
        if request.body["model"] == "refused":
            return await refuse(401, f"Incorrect API key provided: {KEY}")(writer, request)
        return await complete("a fox")(writer, request)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.__aexit__(), self._loop).result(WAIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()


@pytest.fixture(scope="module")
def models() -> Iterator[ModelServer]:
    server = ModelServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def home_system(start_system: Callable[..., QueueSystem], models: ModelServer) -> Iterator[QueueSystem]:
    groups = "NEKRO_MODELS__"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            f"{groups}TEXT_EMBEDDING__MODEL": "small",
            f"{groups}TEXT_EMBEDDING__EMBEDDING": "true",
            f"{groups}DEFAULT_DRAW_CHAT__MODEL": "painter",
            f"{groups}DEFAULT_DRAW_CHAT__BASE_URL": models.server.base_url,
            f"{groups}DEFAULT_DRAW_CHAT__API_KEY": KEY,
            f"{groups}DEFAULT_DRAW_CHAT__PARAMETERS": '{"temperature": 0.5, "style": "ink"}',
            f"{groups}BROKEN__MODEL": "refused",
            f"{groups}BROKEN__BASE_URL": models.server.base_url,
            f"{groups}BROKEN__API_KEY": KEY,
            "NEKRO_LLM__BASE_URL": models.server.base_url,
            "NEKRO_LLM__MODEL": "main",
            "NEKRO_LLM__API_KEY": "sk-main",
        }.items():
            patch.setenv(name, value)
        yield start_system(HOME)


@pytest.fixture
async def world(home_system: QueueSystem) -> AsyncIterator[QueueWorld]:
    async with QueueWorld.opened(home_system) as opened:
        yield opened


async def test_a_plugin_for_one_adapter_works_in_its_chats_and_names_others(world: QueueWorld) -> None:
    assert (await world.call("group_info", chat_key=GROUP)).value == "123 group active"
    with pytest.raises(NekroError, match=r"not available in this adapter\. Current adapter: discord"):
        await world.call("group_info", chat_key="discord-group_123")
    with pytest.raises(NekroError, match="only in groups"):
        await world.call("group_info", chat_key="onebot_v11-private_5")


async def test_a_method_bans_a_person(world: QueueWorld) -> None:
    assert (await world.call("ban", "77", chat_key=GROUP)).value == "onebot_v11:77 active=False"
    user = await DBUser.get_by_union_id("onebot_v11", "77")
    assert user is not None and not user.is_active and user.ban_until is not None


async def test_history_is_read_within_the_limits_of_the_settings(world: QueueWorld) -> None:
    for number in range(20):
        await world.call("record", f"said {number}", f"heard {number}", 1, chat_key=GROUP)
    recent = (await world.call("recent", chat_key=GROUP)).value
    assert len(recent) == 32 and set(recent) <= {
        *(f":said {number}:0:False" for number in range(20)),
        *(f"Ada:heard {number}:1:False" for number in range(20)),
    }


async def test_messages_that_a_plugin_passes_on_are_recorded_and_start_turns(world: QueueWorld) -> None:
    await world.call("record", "I posted this", "to the others", 0, chat_key=GROUP)
    assert await world.woken(GROUP) == 0
    heard, said = await DBChatMessage.filter(chat_key=GROUP).order_by("-id")
    assert (heard.message_id, heard.sender_nickname, heard.is_tome, heard.chat_type) == (
        "p77",
        "ada in the group",
        0,
        "group",
    )
    assert (said.sender_id, said.content_text, said.ext_data_obj.ref_msg_id) == ("-1", "I posted this", "m1")
    assert (await DBUser.get(platform_userid="9")).username == "Ada"
    await world.call("record", "again", "to you", 1, chat_key=GROUP)
    assert await world.woken(GROUP) == 1


@pytest.mark.extended
async def test_models_are_asked_for_by_the_names_of_their_groups(
    world: QueueWorld, models: ModelServer, home_system: QueueSystem
) -> None:
    models.server.seen.clear()
    assert (await world.call("groups")).value == [
        "broken:chat",
        "default-draw-chat:chat",
        "default:chat",
        "text-embedding:embedding",
    ]
    assert (await world.call("embed", "hello")).value == [0.5, 0.25]
    assert (await world.call("ask", "default-draw-chat", "a fox")).value == "a fox (painter-real, 1200)"
    embedding, drawing = models.server.seen
    assert embedding.headers["authorization"] == "Bearer sk-main"  # the endpoint and key of the agent's model
    assert (embedding.body["model"], embedding.body["dimensions"]) == ("small", 2)
    assert drawing.headers["authorization"] == f"Bearer {KEY}"
    assert (drawing.body["temperature"], drawing.body["style"]) == (0.5, "ink")


async def test_a_missing_model_group_names_its_variable(world: QueueWorld) -> None:
    with pytest.raises(NekroError, match="NEKRO_MODELS__DEFAULT_CHAT__MODEL"):
        await world.call("ask", "default-chat", "hello")


async def test_no_error_and_no_log_contains_a_key(world: QueueWorld, home_system: QueueSystem) -> None:
    with pytest.raises(NekroError, match="Incorrect API key provided") as failure:
        await world.call("ask", "broken", "hello")
    assert KEY not in str(failure.value) and KEY not in home_system.log


async def test_texts_and_ids_of_models_are_cleaned(world: QueueWorld) -> None:
    cleaned = (await world.call("clean", "hey [@id:all@] and @[id:12345]", "(msg_id:77)")).value
    assert cleaned == ["hey @全体成员 and [@id:12345@]", "77"]


async def test_an_image_is_made_small_enough(world: QueueWorld) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    target = io.BytesIO()
    image.effect_noise((300, 200), 90).convert("RGB").save(target, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(target.getvalue()).decode()}"
    small = (await world.call("shrink", url, 9000)).value
    head, _, encoded = small.partition(",")
    content = base64.b64decode(encoded)
    assert head == "data:image/jpeg;base64" and len(content) <= 9000 < len(target.getvalue())
    assert image.open(io.BytesIO(content)).format == "JPEG"
    assert (await world.call("shrink", small, 9000)).value == small
    assert (await world.call("shrink", "data:image/png;base64,AAAA", 1)).value == "data:image/png;base64,AAAA"


async def test_recurring_timers_are_listed_changed_paused_and_resumed(world: QueueWorld) -> None:
    assert (await world.call("timers", chat_key=GROUP)).value == [["later"], "T", "active", 1]


@pytest.mark.extended
async def test_vectors_are_stored_in_the_embedded_database_by_several_processes(
    world: QueueWorld, home_system: QueueSystem, tmp_path: Path
) -> None:
    pytest.importorskip("qdrant_client", reason="qdrant-client is not installed")
    other = Worker(home_system.settings, tmp_path / "other.log", lane="methods", concurrency=None)
    try:
        other.wait_ready()
        await world.call("vectors", 1)  # creates the collection
        await asyncio.gather(*(world.call("vectors", number) for number in range(2, 7)))
        found = (await world.call("vectors", 7)).value
    finally:
        other.stop()
    assert found == [f"note {number}" for number in range(1, 8)]


@pytest.mark.extended
async def test_a_saved_configuration_is_in_force_in_each_process_at_its_next_call(
    world: QueueWorld, home_system: QueueSystem, tmp_path: Path
) -> None:
    """Two worker processes; each keeps the object of its configuration in a name of the module."""
    other = Worker(home_system.settings, tmp_path / "other.log", lane="methods", concurrency=None)
    readers: set[int] = set()
    number = 0
    try:
        other.wait_ready()
        # Which worker serves a call is open, so the rounds go on until both have.
        while number < 20 or (len(readers) < 2 and number < 500):
            number += 1
            await world.call("change_greeting", f"hello {number:03}")
            answers = await asyncio.gather(*(world.call("greeting") for _ in range(8)))
            assert {answer.value[0] for answer in answers} == {f"hello {number:03}"}
            readers |= {answer.value[1] for answer in answers}
    finally:
        other.stop()
    assert len(readers) == 2
