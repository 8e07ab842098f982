"""The OpenAI-compatible API with the unchanged ``openai`` package, on workers as processes."""

from __future__ import annotations

import ast
import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from gateway_process import GatewayProcess
from gateway_server import served
from key_ring import make_key
from openai.types.chat import ChatCompletionUserMessageParam
from openai.types.responses import ResponseStreamEvent
from painter_model import PIXEL, PainterModel
from picture_files import bomb, noise, saved
from PIL import Image
from pydantic import BaseModel
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

from nekro.extensions.openai.bodies import newest_message
from nekro.gateway.app import create_app
from nekro_client.models import NewImagePart, NewTextPart

pytestmark = pytest.mark.extended

#: As front ends send their own functions with every request.
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
DATA_URL = "data:image/png;base64," + base64.b64encode(PIXEL).decode()


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: the rows of turns and responses are tested on both."""
    return sqlite_url


@pytest.fixture(scope="module")
def model() -> Iterator[PainterModel]:
    model = PainterModel()
    yield model
    model.stop()


@pytest.fixture(scope="module")
def agents(make_fleet: Callable[..., Fleet], model: PainterModel) -> Fleet:
    """A fleet that answers."""
    llm = {"base_url": model.start(), "model": "tests-1", "stream": False, "tries": 1}
    fleet = make_fleet(llm=llm, agent={"history_images": 3})
    fleet.start("methods", "rounds")
    return fleet


@pytest.fixture(scope="module")
def key(agents: Fleet) -> str:
    """A key for the fleet that answers."""
    return make_key(agents.settings)


@pytest.fixture(scope="module")
def poor(make_fleet: Callable[..., Fleet], model: PainterModel) -> Fleet:
    """A fleet that answers each person once."""
    llm = {"base_url": model.start(), "model": "tests-1", "stream": False, "tries": 1}
    fleet = make_fleet(llm=llm, budgets={"user": "rounds=1", "warn_at": 1})
    fleet.start("methods", "rounds")
    return fleet


@pytest.fixture(scope="module")
def poor_key(poor: Fleet) -> str:
    """A key for the fleet that answers once."""
    return make_key(poor.settings)


@asynccontextmanager
async def client_of(fleet: Fleet, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(create_app(fleet.settings)) as http,
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client


async def test_a_chat_completion_is_what_the_agent_sends(agents: Fleet, key: str) -> None:
    async with client_of(agents, key) as client:
        done = await client.chat.completions.create(
            model="nekro", user="ada", messages=[{"role": "user", "content": "scene:hello"}]
        )
    assert done.choices[0].message.content == "Hello!\n\nHow are you?"
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (1000, 200)


async def test_usage_that_is_an_estimate_is_marked_by_a_further_number(agents: Fleet, key: str) -> None:
    def said(scene: str) -> list[ChatCompletionUserMessageParam]:
        return [{"role": "user", "content": f"scene:{scene}"}]

    marks: dict[str, list[int | None]] = {}
    async with client_of(agents, key) as client:
        for scene in ("reported", "unreported"):
            done = await client.chat.completions.create(model="nekro", user=scene, messages=said(scene))
            stream = await client.chat.completions.create(
                model="nekro",
                user=scene,
                messages=said(scene),
                stream=True,
                stream_options={"include_usage": True},
            )
            last = [chunk async for chunk in stream][-1]
            response = await client.responses.create(model="nekro", input=f"scene:{scene}")
            again = await client.responses.retrieve(response.id)
            marks[scene] = []
            for one in (done.usage, last.usage, response.usage, again.usage):
                assert one is not None and one.total_tokens > 0
                assert all(type(value) is int or isinstance(value, BaseModel) for _, value in one if value)
                marks[scene].append((one.model_extra or {}).get("estimated_requests"))
    assert marks == {"reported": [None] * 4, "unreported": [1] * 4}


async def test_a_streamed_completion_has_each_message_as_it_is_sent(agents: Fleet, key: str) -> None:
    async with client_of(agents, key) as client:
        stream = await client.chat.completions.create(
            model="nekro",
            user="bob",
            messages=[{"role": "user", "content": "scene:hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert [delta.content for delta in deltas if delta.content] == ["Hello!", "\n\nHow are you?"]
    assert "```" not in "".join(delta.content or "" for delta in deltas)
    reasoning = [(delta.model_extra or {}).get("reasoning_content") for delta in deltas]
    assert "send_msg_text" in next(text for text in reasoning if text)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 1200


@pytest.mark.parametrize(
    "choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"top_k": 5, "seed": 1}]
)
async def test_functions_that_a_client_offers_are_ignored(
    agents: Fleet, key: str, choice: dict[str, object]
) -> None:
    """Open WebUI's first message has its own tools; it was refused."""
    said = [{"role": "user", "content": "scene:hello"}]
    body = {"model": "nekro", "user": "tools", "messages": said, "tools": [FUNCTION], **choice}
    async with served(create_app(agents.settings)) as http:
        done = await http.post(
            "/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {key}"},
            timeout=WAIT_SECONDS,
        )
    assert done.status_code == 200, done.text
    assert done.json()["choices"][0]["message"]["content"] == "Hello!\n\nHow are you?"


async def test_people_and_chats_of_open_webui_do_not_share_a_chat(agents: Fleet, key: str) -> None:
    """It states them in headers, not in `user`."""
    said = [{"role": "user", "content": "scene:hello"}]
    body = {"model": "nekro", "messages": said}
    people = [("ada", "1"), ("ada", "2"), ("bob", "1"), ("ada", "1")]
    async with served(create_app(agents.settings)) as http:
        headers = {"Authorization": f"Bearer {key}"}
        for person, chat in people:
            stated = {"X-OpenWebUI-User-Id": f"webui-{person}", "X-OpenWebUI-Chat-Id": chat}
            done = await http.post(
                "/v1/chat/completions", json=body, headers=headers | stated, timeout=WAIT_SECONDS
            )
            assert done.status_code == 200, done.text
        chats = (await http.get("/api/v1/chats", headers=headers)).json()["items"]
        seen = [
            (await http.get(f"/api/v1/chats/{chat['chat_key']}/messages", headers=headers)).json()["items"]
            for chat in chats
        ]
    counts = [
        sum(1 for message in messages if str(message["sender_id"]).startswith("webui-")) for messages in seen
    ]
    assert sorted(count for count in counts if count) == [1, 1, 2]


async def test_an_answer_that_is_not_unicode_arrives(agents: Fleet, key: str) -> None:
    async with client_of(agents, key) as client:
        messages: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "scene:half"}]
        done = await client.chat.completions.create(model="nekro", user="half", messages=messages)
        assert done.choices[0].message.content == "Half \ud83d of it"
        response = await client.responses.create(model="nekro", user="half", input="scene:half")
        assert response.output_text == "Half \ud83d of it"
        assert (await client.responses.retrieve(response.id)).output_text == "Half \ud83d of it"
        # The names of fields in errors are those of the request.
        refused = await client._client.post(
            f"{client.base_url}chat/completions",
            content='{"\\ud83d": 1}',
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        assert refused.status_code == 400, refused.text


async def test_pictures_reach_the_model_and_files_return_as_links(agents: Fleet, key: str) -> None:
    async with client_of(agents, key) as client:
        content = [
            {"type": "text", "text": "scene:look"},
            {"type": "image_url", "image_url": {"url": DATA_URL}},
        ]
        done = await client.chat.completions.create(
            model="nekro",
            user="painter",
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
        )
        assert done.choices[0].message.content == "I see 1: data:image/png;base64"
        drawn = await client.chat.completions.create(
            model="nekro", user="painter", messages=[{"role": "user", "content": "scene:draw"}]
        )
        text, link = (drawn.choices[0].message.content or "").split("\n\n")
        assert text == "Here it is." and link.startswith("![plot.png](http://127.0.0.1:")
        url = link.partition("(")[2].rstrip(")")
        async with httpx.AsyncClient(timeout=WAIT_SECONDS) as browser:
            picture = await browser.get(url)
            assert (picture.content, picture.headers["content-type"]) == (PIXEL, "image/png")
            assert picture.headers["cross-origin-resource-policy"] == "cross-origin"
            token = url.rsplit("/", 2)[1]
            assert (await browser.get(url.replace(token, token[:-3] + "AAA"))).status_code == 404


async def test_pictures_are_made_small_and_code_opens_every_named_file(
    agents: Fleet, key: str, model: PainterModel
) -> None:
    files = {
        "wide.png": saved(noise(3000, 40)),
        "bomb.png": bomb(50_000),
        "live.heic": b"\x00\x00\x00\x18ftypheic" + bytes(40),
        "voice (1).ogg": b"OggS" + bytes(60),
        "clip.mp4": bytes(70),
        "日本 <b>] 'x' .txt": b"text",
    }
    headers = {"Authorization": f"Bearer {key}"}
    async with client_of(agents, key) as client:
        posted = await client._client.post(
            str(client.base_url).replace("/v1/", "/api/v1/chats/pictures-1/messages"),
            data={"text": "Look", "user_id": "painter", "to_agent": "false"},
            files=[("file", (name, content)) for name, content in files.items()],
            headers=headers,
        )
        assert posted.status_code == 202, posted.text
        done = await client.chat.completions.create(
            model="nekro",
            user="painter",
            messages=[{"role": "user", "content": "scene:files"}],
            extra_headers={"X-Nekro-Chat": "pictures-1"},
        )
    opened = ast.literal_eval(done.choices[0].message.content or "")
    stored = [part["file"]["path"] for part in posted.json()["message"]["parts"] if part["type"] != "text"]
    assert dict(opened) == dict(zip(stored, map(len, files.values()), strict=True))
    (asked,) = [body for body in model.seen if "scene:files" in str(body)]
    contents = [message["content"] for message in asked["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    (url,) = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    content = base64.b64decode(url.partition(",")[2])
    assert Image.open(io.BytesIO(content)).size == (2048, 27) and len(content) <= 1 << 20
    prompt = "\n".join(part["text"] for part in parts if part["type"] == "text")
    assert "because it has 50000 x 50000 pixels, more than 40000000]" in prompt
    assert f"[file: {stored[3]} (audio/ogg, 64 bytes)]" in prompt


def test_everything_since_the_last_answer_is_posted() -> None:
    image = {"type": "image_url", "image_url": {"url": DATA_URL}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "old"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": [image]},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "new"},
    ]
    assert newest_message(messages, param="m") == [
        NewImagePart(data_url=DATA_URL),
        NewTextPart(text="new"),
    ]
    assert newest_message(messages[:2], param="m") == [NewTextPart(text="old")]


async def test_the_chat_follows_from_the_user_or_the_header(agents: Fleet, key: str) -> None:
    async with client_of(agents, key) as client:
        named = {"X-Nekro-Chat": "named-1"}
        for user, headers in (("carl", {}), ("carl", {}), ("dora", {}), ("dora", named)):
            await client.chat.completions.create(
                model="nekro",
                user=user,
                messages=[{"role": "user", "content": "scene:silent"}],
                extra_headers=headers,
            )
    services = agents.services()
    async with services.database.read() as transaction:
        chats = await transaction.chat_listing.page(limit=100)
        sizes = {
            chat.chat_key: len(await transaction.messages.newest(chat.chat_key, limit=10)) for chat in chats
        }
    await services.database.dispose()
    assert sizes["named-1"] == 1 and 2 in sizes.values()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "system", "content": "be kind"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "messages.0.content"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}],
                    }
                ]
            },
            400,
            "messages.0.content.0.image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            400,
            "messages.0.content.0.type",
        ),
        ({"n": 2}, 400, "n"),
        ({"tools": [FUNCTION], "tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": FUNCTION}, 400, "tool_choice"),
        ({"functions": [FUNCTION["function"]], "function_call": {"name": "f"}}, 400, "function_call"),
    ],
)
async def test_errors_have_the_form_of_openai(
    agents: Fleet, key: str, fields: dict[str, object], status: int, param: str
) -> None:
    body = {"model": "nekro", "messages": [{"role": "user", "content": "hello"}], **fields}
    async with served(create_app(agents.settings)) as http:
        url = "/v1/chat/completions"
        answer = await http.post(url, json=body, headers={"Authorization": f"Bearer {key}"})
        refused = await http.post(url, json=body, headers={"Authorization": "Bearer nk_none"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_failed_turn_is_an_error_that_is_not_repeated(
    agents: Fleet, key: str, model: PainterModel
) -> None:
    async with (
        served(create_app(agents.settings)) as http,
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key) as client,
    ):
        asked = len(model.seen)
        with pytest.raises(openai.InternalServerError, match="the model refuses") as failed:
            await client.chat.completions.create(
                model="nekro", user="eve", messages=[{"role": "user", "content": "scene:fail"}]
            )
        assert failed.value.code
        assert len(model.seen) == asked + 1
        stream = await client.chat.completions.create(
            model="nekro", user="eve", messages=[{"role": "user", "content": "scene:fail"}], stream=True
        )
        with pytest.raises(openai.APIError, match="the model refuses"):
            async for _ in stream:
                pass
        response = await client.responses.create(model="nekro", user="eve", input="scene:fail")
        assert response.status == "failed"
        assert response.error is not None and "the model refuses" in response.error.message


async def test_a_used_up_budget_is_an_error_with_a_code(
    poor: Fleet, poor_key: str, model: PainterModel
) -> None:
    question: ChatCompletionUserMessageParam = {"role": "user", "content": "scene:hello"}
    async with (
        served(create_app(poor.settings)) as http,
        # With the repetitions that the client makes by itself.
        openai.AsyncOpenAI(
            base_url=f"{http.base_url}/v1", api_key=poor_key, default_headers={"X-Nekro-Chat": "poor-1"}
        ) as client,
    ):
        await client.chat.completions.create(model="nekro", user="ivy", messages=[question])
        asked = len(model.seen)
        with pytest.raises(openai.RateLimitError, match=r"1 of 1 rounds.*renews at") as refused:
            await client.chat.completions.create(model="nekro", user="ivy", messages=[question])
        assert (refused.value.code, refused.value.type) == ("budget_exceeded", "rate_limit_error")
        stream = await client.chat.completions.create(
            model="nekro", user="ivy", messages=[question], stream=True
        )
        with pytest.raises(openai.APIError, match="1 of 1 rounds") as cut:
            async for _ in stream:
                pass
        assert cut.value.code == "budget_exceeded"
        response = await client.responses.create(model="nekro", user="ivy", input="scene:hello")
        assert response.status == "failed" and response.error is not None
        assert response.error.code == "rate_limit_exceeded"
        assert response.error.message.startswith("budget_exceeded: ")
        events = await client.responses.create(model="nekro", user="ivy", input="scene:hello", stream=True)
        assert [event.type async for event in events][-1] == "response.failed"
        answer = await http.get(
            "/api/v1/chats/poor-1/messages", headers={"Authorization": f"Bearer {poor_key}"}
        )
    kinds = [item["kind"] for item in answer.json()["items"]]
    assert kinds.count("user") == 5, "a request was repeated"
    assert len(model.seen) == asked


async def test_models_are_listed(agents: Fleet, key: str) -> None:
    async with client_of(agents, key) as client:
        assert [item.id async for item in client.models.list()] == ["nekro"]
        assert (await client.models.retrieve("nekro")).id == "nekro"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_a_response_is_created_read_continued_and_deleted(agents: Fleet, key: str) -> None:
    async with client_of(agents, key) as client:
        first = await client.responses.create(model="nekro", input="scene:hello", metadata={"a": "b"})
        assert (first.status, first.output_text) == ("completed", "Hello!How are you?")
        assert first.usage is not None and first.usage.total_tokens == 1200
        again = await client.responses.retrieve(first.id)
        assert again.to_dict() == first.to_dict()
        image = {"type": "input_image", "image_url": DATA_URL, "detail": "auto"}
        content = [{"type": "input_text", "text": "scene:look"}, image]
        second = await client.responses.create(
            model="nekro",
            input=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
            previous_response_id=first.id,
        )
        assert second.output_text == "I see 1: data:image/png;base64"
        third = await client.responses.create(
            model="nekro", input="scene:look", previous_response_id=second.id, store=False
        )
        # The picture is in the history of the conversation.
        assert third.output_text == "I see 1: data:image/png;base64"
        other = await client.responses.create(model="nekro", input="scene:look")
        assert other.output_text == "I see 0: "
        await client.responses.delete(first.id)
        for gone in (first.id, third.id, "resp_none"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="nekro", input="scene:hello", previous_response_id=first.id)


async def test_a_repeated_request_posts_one_message(agents: Fleet, key: str, model: PainterModel) -> None:
    async with client_of(agents, key) as client:
        asked = len(model.seen)
        headers = {"Idempotency-Key": "once-1"}
        message: ChatCompletionUserMessageParam = {"role": "user", "content": "scene:hello"}
        answers = [
            await client.chat.completions.create(
                model="nekro", user="once", messages=[message], extra_headers=headers
            )
            for _ in range(2)
        ]
        assert answers[0].id == answers[1].id
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
        responses = [
            await client.responses.create(model="nekro", input="scene:hello", extra_headers=headers)
            for _ in range(2)
        ]
        assert responses[0].id == responses[1].id and responses[0].output == responses[1].output
        assert len(model.seen) == asked + 2


async def test_a_streamed_response_has_numbered_events(agents: Fleet, key: str) -> None:
    async with client_of(agents, key) as client:
        async with client.responses.stream(model="nekro", input="scene:hello") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        assert final.output_text == "Hello!How are you?"
        again = await client.responses.retrieve(final.id, stream=True, starting_after=4)
        numbers = [event.sequence_number async for event in again]
        assert numbers == list(range(5, len(events)))


async def test_a_background_response_can_be_read_while_it_runs_and_cancelled(
    agents: Fleet, key: str, model: PainterModel
) -> None:
    model.hold()
    async with client_of(agents, key) as client:
        response = await client.responses.create(model="nekro", input="scene:slow", background=True)
        assert response.status == "queued"
        stream = await client.responses.retrieve(response.id, stream=True)
        async for event in stream:
            if event.type == "response.output_text.done":
                assert event.text == "one"
                break
        now = await client.responses.retrieve(response.id)
        assert (now.status, now.output_text) == ("in_progress", "one")
        cancelled = await client.responses.cancel(response.id)
        assert cancelled.status == "cancelled"
        last = [event.type async for event in await client.responses.retrieve(response.id, stream=True)][-1]
        assert last == "response.incomplete"
        waiting = await client.responses.create(model="nekro", input="scene:slow", background=True)
        model.release()
        events = [event async for event in await client.responses.retrieve(waiting.id, stream=True)]
        assert events[-1].type == "response.completed" and events[-1].response.output_text == "onetwo"
        with pytest.raises(openai.BadRequestError):
            whole = await client.responses.create(model="nekro", input="scene:hello")
            await client.responses.cancel(whole.id)


async def test_the_synchronous_client_works_alike(agents: Fleet, key: str) -> None:
    seen: dict[str, object] = {}

    def talk(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            done = client.chat.completions.create(
                model="nekro", user="sync", messages=[{"role": "user", "content": "scene:hello"}]
            )
            seen["plain"] = done.choices[0].message.content
            chunks = client.chat.completions.create(
                model="nekro", user="sync", messages=[{"role": "user", "content": "scene:hello"}], stream=True
            )
            seen["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            seen["response"] = client.responses.create(model="nekro", input="scene:hello").output_text
            events = client.responses.create(model="nekro", input="scene:hello", stream=True)
            seen["events"] = [event.type for event in events][-1]

    async with served(create_app(agents.settings)) as http:
        await http.get("/healthz")
        await asyncio.to_thread(talk, f"{http.base_url}/v1")
    assert seen == {
        "plain": "Hello!\n\nHow are you?",
        "streamed": "Hello!\n\nHow are you?",
        "response": "Hello!How are you?",
        "events": "response.completed",
    }


def test_a_background_response_is_resumed_after_the_gateway_was_killed(
    agents: Fleet, key: str, model: PainterModel
) -> None:
    model.hold()
    seen: list[ResponseStreamEvent] = []
    with GatewayProcess(agents) as gateway:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
            events = client.responses.create(model="nekro", input="scene:slow", background=True, stream=True)
            response_id = _first_id(next(iter(events)), seen)
        for last in (1, 9, 13):  # within the head, after the program, after the first message
            with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
                events = client.responses.retrieve(
                    response_id, stream=True, starting_after=seen[-1].sequence_number
                )
                for event in events:
                    seen.append(event)
                    if event.sequence_number == last:
                        break
                gateway.kill()
            gateway.start()
            gateway.wait_ready()
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
            events = client.responses.retrieve(response_id, stream=True, starting_after=13)
            waiting = iter(events)
            model.release()
            seen += list(waiting)
    assert [event.sequence_number for event in seen] == list(range(27))
    deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert deltas == ["one", "two"]
    assert seen[-1].type == "response.completed" and seen[-1].response.output_text == "onetwo"


def _first_id(event: ResponseStreamEvent, seen: list[ResponseStreamEvent]) -> str:
    assert event.type == "response.created"
    seen.append(event)
    return event.response.id
