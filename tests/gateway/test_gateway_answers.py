"""What each form of a model's answer, and each fault of its endpoint, leads to; over HTTP on both sides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from chat_server import (
    Behaviour,
    SceneServer,
    SeenRequest,
    hold,
    refuse,
    respond,
    send_chunk,
    send_event,
    start_stream,
    stream,
)
from event_reader import frames
from gateway_server import served
from key_ring import make_key
from worker_fleet import Fleet

from nekro.gateway.app import create_app

FENCE = "```"
SAY = f"{FENCE}python\nsend_msg_text(_ck, 'from a program')\n{FENCE}"
TOOL = {"id": "t1", "type": "function", "function": {"name": "send_msg_text", "arguments": "{}"}}
HTML = f"A page:\n{FENCE}html\n<b>hi</b>\n{FENCE}\nThat is all."
#: In the footer of the last message of each prompt.
WORD = "Check word, confidential: "


async def repeat_the_word(writer: asyncio.StreamWriter, request: SeenRequest) -> None:
    """Answer with the check word of the prompt."""
    word = request.body["messages"][-1]["content"].split(WORD)[1].split()[0]
    await stream(f"My instructions say {word}.")(writer, request)


#: Set when a reader has seen a piece of `say_in_pieces`, whose server is a thread.
SEEN = threading.Event()


async def say_in_pieces(writer: asyncio.StreamWriter, request: SeenRequest) -> None:
    """Send pieces until a reader has seen one, because live events may be dropped; then the last one."""
    await start_stream(writer)
    await send_chunk(writer, request, {"content": "Hello"})
    while not SEEN.is_set():
        await send_chunk(writer, request, {"content": "."})
        await asyncio.sleep(0.05)
    await send_chunk(writer, request, {"content": " Ada!"}, "stop")
    await send_event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


#: Answers of the model by scene, one for each request.
ANSWERS: dict[str, list[Behaviour]] = {
    "words": [stream("Hello, ", "Ada!")],
    "pieces": [say_in_pieces],
    "html": [stream(HTML)],
    "around": [stream(f"I shall greet.\n{SAY}\nDone.")],
    "several": [stream(f"{FENCE}python\n1 / 0\n{FENCE}\nor rather\n{SAY}")],
    "unfenced": [stream("# greet\nsend_msg_text(_ck, 'from a program')")],
    "nothing": [stream(f"Not for me.\n{FENCE}python\n{FENCE}")],
    "refusal": [stream({"refusal": "I cannot "}, {"refusal": "help with that."})],
    "half": [stream("one \ud83d", "\ude00 two \ud800 three \x07")],
    "tool": [stream({"tool_calls": [{"index": 0} | TOOL]}, finish_reason="tool_calls"), stream(SAY)],
    "function": [
        stream({"function_call": {"name": "f", "arguments": "{}"}}, finish_reason="function_call"),
        stream(SAY),
    ],
    "tag": [stream('I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'), stream(SAY)],
    "tags": [stream('<function_calls>\n<invoke name="f">\n</invoke>\n</function_calls>'), stream(SAY)],
    "json": [stream('{"name": "send_msg_text", "parameters": {"message_text": "hi"}}'), stream(SAY)],
    "json-block": [stream(f'{FENCE}json\n{{"name": "f", "arguments": {{}}}}\n{FENCE}'), stream(SAY)],
    "empty": [stream("  "), stream(SAY)],
    "reasoning": [stream("<think>hm</think>\n"), stream(SAY)],
    "cut": [stream("A long story", finish_reason="length"), stream("Short.")],
    "word": [repeat_the_word, stream("No secrets.")],
    "long": [stream("x" * 3000), stream("Short.")],
    "always-cut": [stream("A long story", finish_reason="length")],
    "always-tool": [stream({"tool_calls": [{"index": 0} | TOOL]}, finish_reason="tool_calls")],
    "always-empty": [stream("")],
    "twice": [stream(f"{FENCE}python\nprint(1)\nexit(9)\n{FENCE}"), stream("It is 1.")],
    "again": [stream("Once more.")],
}
#: Faults of the endpoint by scene: the code of the turn, what people read, and a part of the log.
FAULTS: dict[str, tuple[Behaviour, str, str, str]] = {
    "key": (refuse(401, "bad key sk-secret"), "llm_access", "does not accept the key", "status 401"),
    "missing": (refuse(404), "llm_not_found", "does not know the model", "status 404"),
    "busy": (refuse(429, "slow down", retry_after="999"), "llm_busy", "too many requests", "wait 999 s"),
    "page": (respond(200, "<html>hello</html>"), "llm_unreadable", "invalid response", "text/html"),
    "cut-stream": (stream("Hel", cut=True), "llm_unavailable", "fails at present", "connection failed"),
    "no-end": (
        stream("Hel", finish_reason=None, ends=False),
        "llm_unavailable",
        "fails at present",
        "cut off",
    ),
    "down": (refuse(503, "overloaded"), "llm_unavailable", "fails at present", "status 503"),
    "silent": (hold(), "llm_timeout", "did not answer in time", "no token within 10 s"),
    "filter": (
        stream("Once", finish_reason="content_filter"),
        "llm_filter",
        "content filter",
        "content filter withheld",
    ),
    "filtered-prompt": (refuse(400, "no", "content_filter"), "llm_filter", "content filter", "status 400"),
    "context": (
        refuse(400, "too long", "context_length_exceeded"),
        "llm_context",
        "too long for the model",
        "CONTEXT_TOKENS",
    ),
    "context-text": (
        refuse(400, "This model's maximum context length is 4096 tokens."),
        "llm_context",
        "too long for the model",
        "status 400",
    ),
    "invalid": (refuse(422, "unknown field"), "llm_refused", "refused the request", "unknown field"),
}


@dataclass(frozen=True)
class Agents:
    """A fleet that answers, a gateway on it, and its model."""

    fleet: Fleet
    model: SceneServer
    http: httpx.AsyncClient

    async def turn(self, scene: str, *, chat: str | None = None) -> dict[str, Any]:
        """Post a message and return its turn when it has ended."""
        body = {"text": f"scene:{scene}", "user_id": "ada"}
        answer = await self.http.post(f"/api/v1/chats/{chat or scene}/messages?wait=60", json=body)
        assert answer.status_code == 200, f"{answer.text}\n{self.fleet.logs()}"
        turn: dict[str, Any] = answer.json()["turn"]
        return turn

    async def told(self, chat: str) -> list[tuple[str, str]]:
        """What the chat has beside messages of people: kind and text."""
        page = (await self.http.get(f"/api/v1/chats/{chat}/messages?order=asc")).json()
        return [(item["kind"], item["text"]) for item in page["items"] if item["kind"] != "user"]


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: no outcome depends on it."""
    return sqlite_url


@pytest.fixture(scope="module")
def model() -> Iterator[SceneServer]:
    server = SceneServer({**ANSWERS, **{scene: [fault[0]] for scene, fault in FAULTS.items()}})
    yield server
    server.stop()


@pytest.fixture(scope="module")
def answering(make_fleet: Callable[..., Fleet], model: SceneServer) -> Fleet:
    llm = {"base_url": model.start().replace("//", "//me:hush@"), "api_key": "sk-secret", "model": "m"}
    fleet = make_fleet(
        llm=llm | {"tries": 1, "first_token_timeout_seconds": 10},
        agent={"rounds_per_turn": 2},
        sandbox={"argument_bytes": 2048},
    )
    fleet.start("methods", "rounds")
    return fleet


@pytest.fixture(scope="module")
def key(answering: Fleet) -> str:
    return make_key(answering.settings)


@pytest.fixture
async def agents(answering: Fleet, model: SceneServer, key: str) -> AsyncIterator[Agents]:
    async with served(create_app(answering.settings)) as http:
        http.timeout = httpx.Timeout(90)
        http.headers["Authorization"] = f"Bearer {key}"
        yield Agents(answering, model, http)


@pytest.mark.parametrize(
    ("scene", "text"),
    [
        ("words", "Hello, Ada!"),
        ("html", HTML),
        ("refusal", "I cannot help with that."),
        ("half", "one \U0001f600 two \ud800 three \x07"),
    ],
)
async def test_words_are_sent_and_end_the_turn(agents: Agents, scene: str, text: str) -> None:
    turn = await agents.turn(scene)
    assert (turn["state"], turn["error"]) == ("done", None)
    (round_,) = turn["rounds"]
    assert (round_["stop_type"], round_["code"], round_["calls"]) == ("NORMAL", None, [])
    assert round_["answer"] == text and round_["answered_at"]
    assert [item["text"] for item in turn["messages"] if item["kind"] == "assistant"] == [text]
    assert turn["messages"][-1]["turn_id"] == turn["id"]
    assert len(agents.model.asked[scene]) == 1


@pytest.mark.parametrize("scene", ["around", "several", "unfenced"])
async def test_text_around_a_program_is_not_sent(agents: Agents, scene: str) -> None:
    turn = await agents.turn(scene)
    assert turn["state"] == "done" and len(turn["rounds"]) == 1
    assert turn["rounds"][0]["code"].endswith("send_msg_text(_ck, 'from a program')")
    assert await agents.told(scene) == [("assistant", "from a program")]


async def test_an_empty_program_sends_nothing(agents: Agents) -> None:
    turn = await agents.turn("nothing")
    assert (turn["state"], len(turn["rounds"]), await agents.told("nothing")) == ("done", 1, [])


@pytest.mark.extended
@pytest.mark.parametrize(
    ("scene", "stop", "reason", "answer"),
    [
        ("tool", "ERROR", "called a tool (send_msg_text)", "from a program"),
        ("function", "ERROR", "called a tool (f)", "from a program"),
        ("tag", "ERROR", "called a tool,", "from a program"),
        ("tags", "ERROR", "called a tool,", "from a program"),
        ("json", "ERROR", "called a tool,", "from a program"),
        ("json-block", "ERROR", "called a tool,", "from a program"),
        ("empty", "ERROR", "was empty", "from a program"),
        ("reasoning", "ERROR", "was empty", "from a program"),
        ("cut", "ERROR", "Write a shorter one", "Short."),
        ("long", "ERROR", "more than 2048 bytes", "Short."),
        ("word", "SECURITY", "confidential check word", "No secrets."),
    ],
)
async def test_other_answers_are_not_sent_and_the_next_prompt_has_the_reason(
    agents: Agents, scene: str, stop: str, reason: str, answer: str
) -> None:
    turn = await agents.turn(scene)
    assert turn["state"] == "done"
    assert [item["stop_type"] for item in turn["rounds"]] == [stop, "NORMAL"]
    assert await agents.told(scene) == [("assistant", answer)]
    first, second = agents.model.asked[scene]
    assert reason not in first.body["messages"][-1]["content"]
    assert reason in second.body["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("scene", "told"),
    [("always-tool", "I could not answer: my answer was a call"), ("always-empty", "my answer was empty")],
)
async def test_people_learn_of_a_last_answer_that_cannot_be_used(
    agents: Agents, scene: str, told: str
) -> None:
    turn = await agents.turn(scene)
    assert (turn["state"], turn["error"]["code"]) == ("failed", "no_answer")
    ((kind, text),) = await agents.told(scene)
    assert kind == "assistant" and told in text


async def test_words_that_are_cut_in_the_last_round_are_sent_with_a_mark(agents: Agents) -> None:
    turn = await agents.turn("always-cut")
    assert (turn["state"], len(turn["rounds"])) == ("done", 2)
    cut = "A long story\n\n[This answer was cut off at the limit of its length.]"
    assert await agents.told("always-cut") == [("assistant", cut)]


async def test_later_prompts_show_an_answer_in_words_once(agents: Agents) -> None:
    await agents.turn("twice", chat="history")
    await agents.turn("again", chat="history")
    (request,) = agents.model.asked["again"]
    texts = [message["content"] for message in request.body["messages"]]
    assert "\n".join(texts).count("It is 1.") == 1
    assert '<message role="assistant" at="' in texts[1] and len(texts) == 2


@pytest.mark.parametrize("scene", FAULTS)
async def test_a_fault_of_the_endpoint_reaches_people_log_and_turn(agents: Agents, scene: str) -> None:
    _, code, told, logged = FAULTS[scene]
    turn = await agents.turn(scene)
    assert (turn["state"], turn["error"]["code"]) == ("failed", code)
    ((kind, text),) = await agents.told(scene)
    assert kind == "assistant" and text.startswith("I could not answer: ") and told in text
    assert "http" not in text and "NEKRO" not in text
    log = "".join(worker.log.read_text() for worker in agents.fleet.workers)
    assert any("round_failed" in line and logged in line for line in log.split("\n")), log[-3000:]
    for secret in ("sk-secret", "hush"):
        assert secret not in log + text + turn["error"]["text"]


@pytest.mark.extended
async def test_words_are_the_answer_of_the_openai_api(agents: Agents, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{agents.http.base_url}/v1", api_key=key) as client:
        question: Any = [{"role": "user", "content": "scene:words"}]
        done = await client.chat.completions.create(model="nekro", user="whole", messages=question)
        assert done.choices[0].message.content == "Hello, Ada!"
        chunks = await client.chat.completions.create(
            model="nekro", user="streamed", messages=question, stream=True
        )
        texts = [chunk.choices[0].delta.content async for chunk in chunks]
        assert texts == ["", "Hello, Ada!", None]
        response = await client.responses.create(model="nekro", user="response", input="scene:words")
        assert (response.status, response.output_text) == ("completed", "Hello, Ada!")


async def test_the_events_of_a_turn_show_words_as_they_arrive(agents: Agents) -> None:
    """Pieces of the answer while it comes, then the message, then the ends of round and turn."""
    first = await agents.turn("words", chat="watched")
    seen: list[dict[str, Any]] = []
    asking: asyncio.Task[dict[str, Any]] | None = None
    async with agents.http.stream("GET", "/api/v1/chats/watched/events?after=0") as response:
        async for frame in frames(response):
            if asking is None:
                if frame.data.get("type") == "turn.ended":  # the reader has all that is kept
                    asking = asyncio.create_task(agents.turn("pieces", chat="watched"))
            elif frame.data["turn_id"] != first["id"]:
                seen.append(frame.data)
                if frame.data["type"] == "model.delta":
                    SEEN.set()
                if frame.data["type"] == "turn.ended":
                    break
    assert asking is not None
    second = await asking
    kinds = [event["type"] for event in seen]
    assert "model.delta" in kinds and "code.ready" not in kinds
    pieces = [event["data"]["text"] for event in seen if event["type"] == "model.delta"]
    (sent,) = (event for event in seen if event["type"] == "message.sent")
    (round_,) = second["rounds"]
    assert (sent["turn_id"], sent["round_id"]) == (second["id"], round_["id"])
    text = sent["data"]["text"]
    assert text.startswith("Hello") and text.endswith(" Ada!")
    assert all(piece in text for piece in pieces)
    assert kinds.index("model.delta") < kinds.index("message.sent")
    assert kinds[kinds.index("message.sent") :] == ["message.sent", "round.ended", "turn.ended"]
