"""Words reach clients while the model writes them; over HTTP on both sides, with the ``openai`` package."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import openai
import pytest
from chat_server import Behaviour, SceneServer, SeenRequest, send_chunk, send_event, start_stream, stream
from event_reader import frames
from gateway_server import served
from key_ring import make_key
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

from nekro.extensions.openai.answers import AnswerReader, Piece, Words, _Parts
from nekro.gateway.app import create_app
from nekro_agent.shared_clock import shared_time
from nekro_client.models import Event

pytestmark = pytest.mark.extended

FENCE = "```"
#: By scene: set when a reader has seen words of it. The model is a thread.
SEEN: dict[str, threading.Event] = {}
#: By scene: set when some words were written.
WRITING: dict[str, threading.Event] = {}


def write(scene: str, *rest: str, finish_reason: str | None = "stop", cut: bool = False) -> Behaviour:
    """Write words until a reader has seen some, because live events may be dropped; then the rest."""

    async def behave(writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        await start_stream(writer)
        await send_chunk(writer, request, {"content": "I look it up for you"})
        while not SEEN[scene].is_set():
            await send_chunk(writer, request, {"content": " now"})
            await asyncio.sleep(0.05)
            WRITING[scene].set()
        for piece in rest:
            await send_chunk(writer, request, {"content": piece})
        if cut:
            return
        if finish_reason is None:
            await asyncio.Event().wait()
        await send_chunk(writer, request, {}, finish_reason)
        await send_event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return behave


PROGRAM = f":\n{FENCE}python\nsend_msg_text(_ck, 'It is 4.')\n{FENCE}"
SCENES: dict[str, list[Behaviour]] = {
    "words": [write("words", ": it is", " 4.\n\nBye.")],
    "preface": [write("preface", PROGRAM)],
    "cut": [write("cut", finish_reason="length"), stream("Short, but whole.")],
    "fail": [write("fail", cut=True)],
    "cancel": [write("cancel", finish_reason=None)],
    "midway": [write("midway", ": it is 4.")],
}


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: words come from the broker."""
    return sqlite_url


@pytest.fixture(scope="module")
def agents(make_fleet: Callable[..., Fleet]) -> Iterator[Fleet]:
    model = SceneServer(SCENES)
    fleet = make_fleet(llm={"base_url": model.start(), "model": "m", "stream": True, "tries": 1})
    fleet.start("methods", "rounds")
    yield fleet
    model.stop()


@pytest.fixture(scope="module")
def key(agents: Fleet) -> str:
    return make_key(agents.settings)


@asynccontextmanager
async def clients(fleet: Fleet, key: str) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx.AsyncClient]]:
    async with (
        served(create_app(fleet.settings)) as http,
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key, max_retries=0) as client,
    ):
        http.headers["Authorization"] = f"Bearer {key}"
        yield client, http


def begin(scene: str) -> None:
    SEEN[scene], WRITING[scene] = threading.Event(), threading.Event()


async def completion(client: openai.AsyncOpenAI, scene: str, on_words: Callable[[], Any]) -> tuple[str, str]:
    """Return content and reasoning of a streamed completion; ``on_words`` is called at the first words."""
    messages: Any = [{"role": "user", "content": f"scene:{scene}"}]
    chunks = await client.chat.completions.create(
        model="nekro", messages=messages, stream=True, extra_headers={"X-Nekro-Chat": scene}
    )
    content = reasoning = ""
    async for chunk in chunks:
        delta = chunk.choices[0].delta
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        if delta.content and not content:
            assert not SEEN[scene].is_set()
            on_words()
        content += delta.content or ""
    return content, reasoning


async def test_a_completion_has_words_while_they_are_written(agents: Fleet, key: str) -> None:
    begin("words")
    async with clients(agents, key) as (client, http):
        content, reasoning = await completion(client, "words", SEEN["words"].set)
        assert content.startswith("I look it up for you") and content.endswith(": it is 4.\n\nBye.")
        assert reasoning == ""
        messages = (await http.get("/api/v1/chats/words/messages")).json()["items"]
    assert [message["text"] for message in messages if message["kind"] == "assistant"] == [content]


async def test_a_response_has_words_as_they_are_written_and_can_be_resumed(agents: Fleet, key: str) -> None:
    begin("words")
    async with clients(agents, key) as (client, _):
        events = []
        async for event in await client.responses.create(model="nekro", input="scene:words", stream=True):
            events.append(event)
            if event.type == "response.output_text.delta":
                SEEN["words"].set()
        last = events[-1]
        assert last.type == "response.completed"
        text = last.response.output_text
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == text
        assert text.endswith(": it is 4.\n\nBye.")
        assert [event.sequence_number for event in events] == list(range(len(events)))
        for after in (3, 5, len(events) - 2):
            again = await client.responses.retrieve(last.response.id, stream=True, starting_after=after)
            assert [event async for event in again] == events[after + 1 :]


async def test_a_program_is_reasoning_and_the_text_before_it_a_preface(agents: Fleet, key: str) -> None:
    begin("preface")
    async with clients(agents, key) as (client, _):
        content, reasoning = await completion(client, "preface", SEEN["preface"].set)
        preface, _, answer = content.partition("\n\n")
        assert preface.startswith("I look it up for you") and answer == "It is 4."
        assert reasoning.startswith(f"{FENCE}python\nsend_msg_text(_ck, 'It is 4.')\n{FENCE}\n")
        begin("preface")
        events = []
        async for event in await client.responses.create(model="nekro", input="scene:preface", stream=True):
            events.append(event)
            if event.type == "response.output_text.delta":
                SEEN["preface"].set()
        final = events[-1]
        assert final.type == "response.completed"
        kinds = [(item.type, getattr(item, "phase", None)) for item in final.response.output]
        assert kinds == [("message", "commentary"), ("reasoning", None), ("message", None)]
        again = await client.responses.retrieve(final.response.id, stream=True, starting_after=0)
        assert [event async for event in again] == events[1:]
    assert all(FENCE not in event.delta for event in events if event.type == "response.output_text.delta")


async def test_words_that_were_cut_off_are_followed_by_the_answer(agents: Fleet, key: str) -> None:
    begin("cut")
    async with clients(agents, key) as (client, _):
        content, _ = await completion(client, "cut", SEEN["cut"].set)
    shown, _, answer = content.partition("\n\n")
    assert shown.startswith("I look it up for you") and answer == "Short, but whole."


async def test_a_failed_turn_ends_with_an_error_after_the_words(agents: Fleet, key: str) -> None:
    begin("fail")
    async with clients(agents, key) as (client, _):
        with pytest.raises(openai.APIError, match="model"):
            await completion(client, "fail", SEEN["fail"].set)


async def test_a_cancelled_turn_ends_after_the_words(agents: Fleet, key: str) -> None:
    begin("cancel")
    async with clients(agents, key) as (client, http):
        tasks = []

        def on_words() -> None:
            SEEN["cancel"].set()
            tasks.append(asyncio.create_task(http.post("/api/v1/chats/cancel/cancel")))

        content, _ = await completion(client, "cancel", on_words)
        await asyncio.gather(*tasks)
    assert content.startswith("I look it up for you")


async def test_a_reader_that_comes_midway_gets_words_from_their_beginning(agents: Fleet, key: str) -> None:
    begin("midway")
    async with clients(agents, key) as (_, http), asyncio.timeout(WAIT_SECONDS):
        body = {"text": "scene:midway", "user_id": "ada"}
        posted = await http.post("/api/v1/chats/midway/messages", json=body)
        assert posted.status_code == 202, posted.text
        assert await asyncio.to_thread(WRITING["midway"].wait, WAIT_SECONDS)
        words, kinds = "", []
        async with http.stream("GET", "/api/v1/chats/midway/events?after=0") as response:
            async for frame in frames(response):
                kinds.append(frame.event)
                if frame.event == "message.delta" and frame.data["data"]["offset"] == 0:
                    words = frame.data["data"]["text"]
                    if "now now" in words:  # the model writes on, and all is sent again each second
                        SEEN["midway"].set()
                if frame.event == "message.sent":
                    assert frame.data["data"]["text"].startswith(words)
                    break
    assert words.startswith("I look it up for you now now") and "message.withdrawn" not in kinds


def test_a_round_whose_beginning_is_heard_late_keeps_its_words() -> None:
    """Live events are faster than kept ones; only a second attempt writes anew."""

    def event(kind: str, **data: Any) -> Event:
        return Event(type=kind, chat_key="c", at=shared_time(), turn_id="t", round_id="r", data=data)

    class Reader:
        def piece(self, sent: Event) -> Piece:
            return Piece(text=sent.data["text"])

    first = event("message.delta", offset=0, text="Hello, ")
    sent = event("message.sent", text="Hello, Ada.")
    for attempt, expected in (
        (1, [Words(text="Hello, "), Piece(text="Hello, Ada.")]),
        (2, [Words(text="Hello, "), Piece(text="Hello, ", is_preface=True), Piece(text="Hello, Ada.")]),
    ):
        parts = _Parts(cast("AnswerReader", Reader()))
        events = (first, event("round.started", attempt=attempt), sent)
        assert [part for one in events for part in parts.of(one)] == expected
