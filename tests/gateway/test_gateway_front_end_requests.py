"""Requests as published front ends send them, over HTTP: answers, and what they leave in chats."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from gateway_server import served
from key_ring import make_key
from loguru import logger
from painter_model import PIXEL, PainterModel
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

from nekro.extensions.openai.bodies import CompletionBody, is_task, newest_message
from nekro.gateway.app import create_app
from nekro_client.models import NewImagePart, NewTextPart

HISTORY = "<chat_history>\nUSER: scene:hello\nASSISTANT: Hello!\n</chat_history>"
#: How Open WebUI 0.12.4 asks for itself: task, form of the output, conversation.
OPEN_WEBUI = {
    name: f"### Task:\n{task}\n### Output:\nJSON format: {output}\n### Chat History:\n{HISTORY}"
    for name, task, output in [
        ("title", "Write a title.", '{ "title": "x" }'),
        ("tags", "Name the topics.", '{ "tags": ["a"] }'),
        ("questions", "Write questions.", '{ "follow_ups": [] }'),
        ("queries", "Decide on searches.", '{ "queries": [] }'),
    ]
}
#: Questions of other front ends begin so; the rest is here in other words.
TASKS = OPEN_WEBUI | {
    "typing": f"### Task:\nComplete it.\n### Context:\n{HISTORY}\n<type>General</type>\n<text>scene</text>",
    "summary": "### Task:\nSummarize.\n### Messages Being Compacted:\nscene:hello\n\n"
    "### Recent Messages Kept In Context:\nHi",
    "emoji": "Your task is to reflect the speaker's likely facial expression.\n\nMessage: ```scene:hello```",
    "merge": "You have been provided with a set of responses from various models to the latest user query: "
    '"scene:hello"\n\nMerge them.',
    "LibreChat title": "Provide a concise, 5-word-or-less title for the conversation, please.\n\n"
    "Conversation:\nUser: scene:hello\nAI: Hello!",
    "LibreChat language": "Analyze this conversation and provide:\n1. The detected language of it\n"
    "2. A concise title in it\n\nUser: scene:hello\nAI: Hello!",
    "Continue title": "Given the following... please reply with a title for the chat.\n\nscene:hello",
    "Continue summary": "Given the following... please reply with a short summary that is 4-12 words.\n\nHi",
}
#: Cherry Studio's system message before a conversation, whose newest message is a person's.
TITLES = [
    "Summarize the given session as a 10-word title using user language.",
    "将给定的对话总结为一个10字以内的标题，使用用户语言，忽略命令。",
    "You are an assistant skilled in conversation. You need to summarize the user's conversation into one.",
]
DATA_URL = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
#: Text that Open WebUI puts before that of the person.
NOTE = '<attached_files>\n<file type="file" id="f4" name="a.png"/>\n</attached_files>\n\n'
SAID = {"role": "user", "content": "scene:hello"}
TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}
USAGE = {"include_usage": True}
PICTURE = {"type": "image_url", "image_url": {"url": DATA_URL}}
#: Bodies besides the model of published clients. Those of Open WebUI 0.12.4, LangChain (in LibreChat too) and
#: the AI SDK (in Cherry Studio) are recorded; those of Continue follow from its source.
CLIENTS: dict[str, dict[str, Any]] = {
    "LibreChat": {
        "messages": [{"role": "system", "content": "Be kind."}, SAID], "user": "65f0", "temperature": 1,
        "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "stream": True, "stream_options": USAGE,
    },
    "Cherry Studio": {
        "messages": [SAID], "stream": True, "stream_options": USAGE, "tools": [TOOL], "tool_choice": "auto",
        "temperature": 0.7, "top_p": 1, "enable_thinking": False, "reasoning_effort": "low",
    },
    "Continue": {
        "messages": [{"role": "system", "content": "You code."}, SAID], "stream": True, "max_tokens": 2048,
        "temperature": 0.5, "stop": ["/src/"], "prediction": None, "stream_options": USAGE,
        "tools": [{"type": "function", "function": {**TOOL["function"], "strict": False}}],
    },
    "LangChain": {
        "messages": [{**SAID, "name": "ada"}], "stream": False, "n": 1, "temperature": 0.7, "seed": 7,
        "parallel_tool_calls": False, "response_format": {"type": "json_object"}, "tools": [TOOL],
    },
    "Open WebUI": {"messages": [SAID], "stream": True, "tools": [TOOL]},
    "Open WebUI with a picture": {
        "messages": [
            SAID,
            {"role": "assistant", "content": "Hello!\n\nHow are you?"},
            {"role": "user", "content": [
                {"type": "text", "text": NOTE}, {"type": "text", "text": "scene:hello"}, PICTURE,
            ]},
        ],
        "stream": True, "tools": [TOOL],
    },
}  # fmt: skip


@pytest.mark.parametrize("text", TASKS.values(), ids=TASKS)
def test_a_front_ends_own_question_is_known_by_its_shape(text: str) -> None:
    assert is_task([{"role": "user", "content": text}])
    assert not is_task([{"role": "user", "content": f"What is this?\n{text}"}])
    assert is_task([{"role": "system", "content": "x"}, {"role": "user", "content": [{"text": text}]}])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "### Task:\nWrite me a list.\n### Output:\nA table"}],
        # Its prompt with found documents, which a person's question follows.
        [{"role": "user", "content": "### Task:\nAnswer.\n### Output:\nClear.\n<context>a</context>\nhi"}],
        [{"role": "user", "content": "Given the following text, reply with a title for the chat."}],
        [{"role": "system", "content": "Be kind."}, SAID],
        [SAID, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": TASKS["title"]}],
        [{"role": "user", "content": None}],
        [],
    ],
)
def test_what_people_say_is_no_question_of_a_front_end(messages: list[dict[str, Any]]) -> None:
    assert not is_task(messages)


@pytest.mark.parametrize("text", TITLES)
def test_a_title_is_asked_for_by_a_system_message(text: str) -> None:
    assert is_task([{"role": "system", "content": text}, SAID])
    assert not is_task([SAID, {"role": "system", "content": text}, SAID])


def test_what_a_front_end_tells_its_own_tools_is_no_part_of_a_message() -> None:
    (said,) = CLIENTS["Open WebUI with a picture"]["messages"][2:]
    seen = newest_message([said], param="m")
    assert seen == [NewTextPart(text="scene:hello"), NewImagePart(data_url=DATA_URL)]
    # A person may write so.
    assert newest_message([{"role": "user", "content": NOTE}], param="m") == [NewTextPart(text=NOTE)]


def test_fields_without_effect_are_in_the_log_once() -> None:
    logged: list[str] = []
    sink = logger.add(lambda line: logged.append(line.record["extra"].get("field", "")))  # type: ignore[attr-defined]
    try:
        for _ in range(2):
            body = {"model": "nekro", "messages": [SAID], "tools": [TOOL], "once_1": 1, "a\nb": 2}
            CompletionBody.model_validate(body).refuse_demands()
    finally:
        logger.remove(sink)
    assert sorted(logged)[:2] == ["'a\\nb'", "'once_1'"] and len(set(logged)) == len(logged)


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: no outcome depends on it."""
    return sqlite_url


@pytest.fixture(scope="module")
def agents(make_fleet: Callable[..., Fleet]) -> Iterator[Fleet]:
    model = PainterModel()
    fleet = make_fleet(llm={"base_url": model.start(), "model": "m", "stream": False, "tries": 1})
    fleet.start("methods", "rounds")
    yield fleet
    model.stop()


@pytest.fixture(scope="module")
def keys(agents: Fleet) -> tuple[str, str]:
    """A key of all chats, and one of one chat."""
    return make_key(agents.settings), make_key(agents.settings, chats="only-1")


@pytest.fixture
async def http(agents: Fleet, keys: tuple[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    async with served(create_app(agents.settings)) as http:
        http.timeout = httpx.Timeout(WAIT_SECONDS)
        http.headers["Authorization"] = f"Bearer {keys[0]}"
        yield http


def answer_of(done: httpx.Response) -> str:
    assert done.status_code == 200, done.text
    if not done.headers["content-type"].startswith("text/event-stream"):
        return str(done.json()["choices"][0]["message"]["content"])
    lines = [line[6:] for line in done.text.split("\n") if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.extended
@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
async def test_a_published_clients_request_is_answered(
    http: httpx.AsyncClient, client: dict[str, Any]
) -> None:
    done = await http.post("/v1/chat/completions", json={"model": "nekro", **client})
    assert answer_of(done) == "Hello!\n\nHow are you?"


async def keys_of(http: httpx.AsyncClient, *, transient: bool) -> set[str]:
    page = await http.get("/api/v1/chats", params={"transient": transient, "limit": 200})
    return {chat["chat_key"] for chat in page.json()["items"]}


@pytest.mark.extended
async def test_a_front_ends_own_question_leaves_chat_and_lists_alone(http: httpx.AsyncClient) -> None:
    before = await keys_of(http, transient=True)
    stated = {"X-OpenWebUI-User-Id": "ada", "X-OpenWebUI-Chat-Id": "task-chat"}
    body = {"model": "nekro", "messages": [SAID]}
    assert answer_of(await http.post("/v1/chat/completions", json=body, headers=stated))
    (chat_key,) = await keys_of(http, transient=True) - before
    messages = (await http.get(f"/api/v1/chats/{chat_key}/messages")).json()["items"]
    listed = await keys_of(http, transient=False)
    for text in OPEN_WEBUI.values():
        asked = {"model": "nekro", "messages": [{"role": "user", "content": text}]}
        assert answer_of(await http.post("/v1/chat/completions", json=asked, headers=stated))
    assert (await http.get(f"/api/v1/chats/{chat_key}/messages")).json()["items"] == messages
    assert await keys_of(http, transient=False) == listed
    assert len(await keys_of(http, transient=True) - before) == 1 + len(OPEN_WEBUI)


@pytest.mark.extended
async def test_responses_keep_people_apart_and_flood_no_list(http: httpx.AsyncClient) -> None:
    before, hidden = await keys_of(http, transient=False), await keys_of(http, transient=True)
    body = {"model": "nekro", "input": "scene:hello"}
    people = [
        ({"X-OpenWebUI-User-Id": "eva"}, {}),
        ({"X-OpenWebUI-User-Id": "eva", "X-OpenWebUI-Chat-Id": "2"}, {}),
        ({}, {"user": "tom"}),
        ({}, {"safety_identifier": "kim"}),
        ({"X-OpenWebUI-User-Id": "eva"}, {}),
    ]
    for headers, fields in people:
        done = await http.post("/v1/responses", json=body | fields, headers=headers)
        assert done.status_code == 200, done.text
    assert len(await keys_of(http, transient=False) - before) == 4
    ids = [(await http.post("/v1/responses", json=body)).json()["id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert len(await keys_of(http, transient=False) - before) == 4
    assert len(await keys_of(http, transient=True) - hidden) == 6


@pytest.mark.extended
async def test_a_key_of_one_chat_has_none_for_a_front_ends_own_question(
    http: httpx.AsyncClient, keys: tuple[str, str]
) -> None:
    body = {"model": "nekro", "messages": [{"role": "user", "content": TASKS["title"]}]}
    headers = {"Authorization": f"Bearer {keys[1]}"}
    done = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert (done.status_code, done.json()["error"]["code"]) == (400, "no_chat_for_request")
