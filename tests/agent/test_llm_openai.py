"""The client against a real server that answers well, badly, slowly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from chat_server import (
    Behaviour,
    ChatServer,
    SeenRequest,
    complete,
    hold,
    refuse,
    respond,
    send_chunk,
    send_event,
    start_stream,
    stream,
)
from loop_clock import LoopClock
from pydantic import SecretStr
from stream_server import StreamServer
from waiting import WAIT_SECONDS

from broker_config.settings import LLMSettings
from nekro.agent.llm import LLMAnswer, LLMRequest, ModelSpent
from nekro.agent.llm.attempt import Fault, RetryPolicy
from nekro.agent.llm.clients import create_client
from nekro.agent.model import ImagePart, PromptMessage, PromptRole, TextPart
from nekro_agent.errors import (
    LLMAccessError,
    LLMBusyError,
    LLMContextError,
    LLMError,
    LLMFilterError,
    LLMNotFoundError,
    LLMRefusedError,
    LLMUnavailableError,
    LLMUnreadableError,
)

if TYPE_CHECKING:
    from nekro.agent.llm.endpoint_client import EndpointClient

REQUEST = LLMRequest(
    messages=(PromptMessage.of(PromptRole.SYSTEM, "Be brief."), PromptMessage.of(PromptRole.USER, "Hello")),
    round_id="r1",
    chat_key="c:1",
)
KEY = "sk-very-secret"


def settings_for(base_url: str, **overrides: Any) -> LLMSettings:
    values: dict[str, Any] = {
        "base_url": base_url, "api_key": SecretStr(KEY), "model": "big",
        "input_price_per_million": 2, "output_price_per_million": 10,
    }  # fmt: skip
    return LLMSettings(**(values | overrides))


def client_of(settings: LLMSettings) -> EndpointClient:
    """A client that waits hardly at all before it tries again."""
    # Not at the head: the package's import is a tenth of the collection, in every process of a test run.
    from nekro.agent.llm.endpoint_client import EndpointClient

    return EndpointClient(settings, backoff_seconds=0.001)


async def ask(*behaviours: Behaviour, **overrides: Any) -> tuple[LLMAnswer, ChatServer]:
    async with ChatServer(list(behaviours)) as server:
        client = client_of(settings_for(server.base_url, **overrides))
        try:
            return await client.complete(REQUEST), server
        finally:
            await client.close()


async def failure(*behaviours: Behaviour, **overrides: Any) -> tuple[str, ChatServer]:
    server = ChatServer(list(behaviours))
    async with server:
        client = client_of(settings_for(server.base_url, **overrides))
        with pytest.raises(LLMError) as caught:
            await client.complete(REQUEST)
        await client.close()
        assert server.base_url in str(caught.value)
    assert KEY not in str(caught.value)
    return str(caught.value), server


async def test_a_streamed_answer_is_assembled_with_model_tokens_and_cost() -> None:
    answer, server = await ask(stream("print", "(1)"))
    assert answer == LLMAnswer(
        text="print(1)", model="big-real", prompt_tokens=1000, answer_tokens=200, finish_reason="stop",
        tries=1, cost=pytest.approx(0.004),
    )  # fmt: skip
    assert server.seen[0].path == "/v1/chat/completions"
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert server.seen[0].body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


async def test_an_answer_without_streaming_is_read() -> None:
    answer, server = await ask(
        complete("print(1)"), stream=False, parameters='{"temperature": 0.5}', max_output_tokens=99
    )
    assert (answer.text, answer.prompt_tokens, answer.tries) == ("print(1)", 1000, 1)
    assert "stream" not in server.seen[0].body
    assert (server.seen[0].body["temperature"], server.seen[0].body["max_tokens"]) == (0.5, 99)


@pytest.mark.parametrize("streams", [True, False])
async def test_pieces_are_passed_on_with_the_number_of_their_try(streams: bool) -> None:
    pieces: list[tuple[int, str]] = []
    request = replace(REQUEST, on_delta=lambda number, text: pieces.append((number, text)))
    good = stream("print", "(2)") if streams else complete("print(2)")
    async with ChatServer([stream("print(", cut=True) if streams else refuse(500), good]) as server:
        client = client_of(settings_for(server.base_url, stream=streams))
        answer = await client.complete(request)
        await client.close()
    assert answer.text == "print(2)"
    if streams:
        assert pieces == [(1, "print("), (2, "print"), (2, "(2)")]
    else:
        assert pieces == [(2, "print(2)")]


@pytest.mark.parametrize(
    ("price", "cached", "cost"),
    [(None, 600, 0.004), (0.5, 600, 0.0031), (0.0, 2000, 0.002), (0.5, None, 0.004), (0.5, "x", 0.004)],
)
async def test_tokens_from_the_endpoints_cache_have_their_own_price(
    price: float | None, cached: Any, cost: float
) -> None:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    body = {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 200, "total_tokens": 1200, **details},
    }  # fmt: skip
    answer, _ = await ask(respond(200, body), stream=False, cached_input_price_per_million=price)
    assert answer.cost == pytest.approx(cost)


async def test_a_truncated_answer_is_marked_as_cut() -> None:
    answer, _ = await ask(stream("print(", finish_reason="length"))
    assert answer.was_cut


async def test_tokens_of_a_stream_without_usage_are_estimated_and_marked() -> None:
    answer, _ = await ask(stream("x", usage=False))
    assert answer.is_estimated and answer.prompt_tokens and answer.answer_tokens and answer.cost
    answer, _ = await ask(stream("x"))
    assert (answer.prompt_tokens, answer.answer_tokens, answer.is_estimated) == (1000, 200, False)


async def test_usage_is_not_requested_again_from_a_server_that_rejects_stream_options() -> None:
    answer, server = await ask(refuse(400, "unknown field stream_options"), stream("x"))
    assert (answer.text, answer.tries) == ("x", 1)
    assert "stream_options" not in server.seen[1].body


async def test_images_are_sent_as_content_parts() -> None:
    request = LLMRequest(
        messages=(
            PromptMessage(
                role=PromptRole.USER,
                parts=(TextPart(text="look"), ImagePart(url="data:image/png;base64,AA==")),
            ),
        )
    )
    async with ChatServer([stream("x")]) as server:
        client = client_of(settings_for(server.base_url))
        await client.complete(request)
        await client.close()
    assert server.seen[0].body["messages"][0]["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503])
async def test_a_transient_error_is_retried(status: int, streams: bool) -> None:
    good = stream("ok") if streams else complete("ok")
    answer, server = await ask(refuse(status), refuse(status), good, stream=streams)
    assert (answer.text, answer.tries, len(server.seen)) == ("ok", 3, 3)


async def test_after_the_last_attempt_the_error_names_status_model_and_endpoint() -> None:
    message, server = await failure(refuse(500, f"overloaded, key {KEY}"), tries=2)
    assert len(server.seen) == 2
    assert "status 500" in message
    assert "big" in message
    assert "after 2 tries" in message


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_a_rejected_request_is_not_retried(status: int) -> None:
    message, server = await failure(refuse(status, "your fault"))
    assert len(server.seen) == 1
    assert f"status {status}" in message
    assert "your fault" in message


async def test_a_wrong_key_names_the_setting() -> None:
    message, _ = await failure(refuse(401))
    assert "NEKRO_LLM__API_KEY" in message


async def test_a_rejected_key_is_not_tried_again() -> None:
    _, server = await failure(refuse(401))
    assert len(server.seen) == 1


async def test_a_connection_closed_during_the_stream_is_retried_from_the_start() -> None:
    answer, _ = await ask(stream("print(", cut=True), stream("print(2)"))
    assert (answer.text, answer.tries) == ("print(2)", 2)


async def test_a_stream_without_a_finish_reason_counts_as_cut() -> None:
    answer, _ = await ask(stream("print(", finish_reason=None, ends=False), stream("print(2)"))
    assert (answer.text, answer.tries) == ("print(2)", 2)


async def test_an_error_inside_the_stream_is_retried() -> None:
    async def broken(writer: asyncio.StreamWriter, request: Any) -> None:
        await start_stream(writer)
        await send_chunk(writer, request, {"content": "pri"})
        event = b'data: {"error": {"message": "engine died"}}\n\n'
        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n0\r\n\r\n")

    answer, _ = await ask(broken, stream("ok"))
    assert (answer.text, answer.tries) == ("ok", 2)


async def test_unreadable_chunks_are_retried() -> None:
    async def broken(writer: asyncio.StreamWriter, _: Any) -> None:
        await start_stream(writer)
        writer.write(b"e\r\ndata: {nonsen\n\r\n2\r\n\n\n\r\n0\r\n\r\n")

    answer, _ = await ask(broken, stream("ok"))
    assert answer.tries == 2


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_without_text_is_an_answer(streams: bool) -> None:
    answer, _ = await ask(stream("  ") if streams else complete(None), stream=streams)
    assert (answer.text.strip(), answer.tries, answer.is_refusal, answer.tool_calls) == ("", 1, False, ())


@pytest.mark.parametrize("streams", [True, False])
async def test_a_refusal_is_the_text_and_is_passed_on(streams: bool) -> None:
    pieces: list[str] = []
    request = replace(REQUEST, on_delta=lambda _, text: pieces.append(text))
    refusal = (
        stream({"refusal": "I can"}, {"refusal": "not."}) if streams else complete(None, refusal="I cannot.")
    )
    async with ChatServer([refusal]) as server:
        client = client_of(settings_for(server.base_url, stream=streams))
        answer = await client.complete(request)
        await client.close()
    assert (answer.text, answer.is_refusal, "".join(pieces)) == ("I cannot.", True, "I cannot.")


@pytest.mark.parametrize("streams", [True, False])
async def test_calls_of_tools_are_named(streams: bool) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    old = {"name": "g", "arguments": "{}"}
    if streams:
        given = stream(
            {"tool_calls": [{"index": 0} | calls[0]]}, {"function_call": old}, finish_reason="tool_calls"
        )
    else:
        given = complete(None, "tool_calls", tool_calls=calls, function_call=old)
    answer, _ = await ask(given, stream=streams)
    assert (answer.text, answer.tool_calls, answer.finish_reason) == ("", ("f", "g"), "tool_calls")


def parts(*sent: Any) -> Behaviour:
    """Send any JSON as the parts of a stream; an object is a part that ends the answer."""

    async def behave(writer: asyncio.StreamWriter, _: SeenRequest) -> None:
        await start_stream(writer)
        end = {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        for part in sent:
            await send_event(writer, json.dumps(end | part if isinstance(part, dict) else part))
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return behave


@pytest.mark.parametrize(
    "choice", [{}, {"delta": None}, {"delta": {"tool_calls": 5}}, {"delta": {"function_call": "x"}}, 5]
)
async def test_a_part_without_text_may_have_any_form(choice: Any) -> None:
    answer, _ = await ask(parts({"choices": [choice]}, {"model": 5, "id": {"a": 1}}))
    assert (answer.text, answer.tool_calls, answer.finish_reason) == ("", (), "stop")


@pytest.mark.parametrize("count", ["many", -5, 1.5, None, 10**12, {"a": 1}])
async def test_numbers_of_tokens_that_are_none_are_estimated(count: Any) -> None:
    """A negative one would give tokens back to a budget, and a huge one does not fit the database."""
    usage = {"prompt_tokens": count, "completion_tokens": count, "total_tokens": count}
    for sent in (usage, [count], "usage"):
        answer, _ = await ask(parts({"usage": sent}))
        assert answer.is_estimated and answer.prompt_tokens and 0 < answer.prompt_tokens < 100
        assert answer.answer_tokens == 0 and answer.cost > 0


@pytest.mark.parametrize(
    ("usage", "text", "is_estimated"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 0}, "words", True),
        ({"prompt_tokens": 0, "completion_tokens": 9}, "words", True),
        ({"prompt_tokens": 9, "completion_tokens": 0}, "", False),
        ({"prompt_tokens": "9", "completion_tokens": 9}, "words", True),
        ({"prompt_tokens": 9, "completion_tokens": -9}, "words", True),
        ({"prompt_tokens": 9, "completion_tokens": 9}, "words", False),
        (None, "words", True),
    ],
)
async def test_tokens_that_cannot_be_are_estimated_and_marked(
    usage: Any, text: str, is_estimated: bool
) -> None:
    choice = {"delta": {"content": text}, "finish_reason": "stop"}
    answer, _ = await ask(parts({"choices": [choice], "usage": usage}))
    assert answer.is_estimated is is_estimated
    assert answer.prompt_tokens and bool(answer.answer_tokens) is bool(text)


@pytest.mark.parametrize("body", [{"choices": [{}]}, {"choices": {"a": 1}}, {"choices": ["x"]}, [1]])
async def test_a_whole_answer_of_another_form_is_unreadable(body: Any) -> None:
    with pytest.raises(LLMUnreadableError):
        await ask(respond(200, body), stream=False)


async def test_a_character_that_is_cut_between_chunks_is_joined() -> None:
    answer, _ = await ask(stream("a\ud83d", "\ude00\ud800"))
    assert answer.text == "a\U0001f600\ud800"


@pytest.mark.parametrize(
    ("behaviour", "error", "tries"),
    [
        (refuse(401), LLMAccessError, 1),
        (refuse(402), LLMAccessError, 1),
        (refuse(403), LLMAccessError, 1),
        (refuse(429, "no credit", "insufficient_quota"), LLMAccessError, 1),
        (refuse(404), LLMNotFoundError, 1),
        (refuse(400, "no such model", "model_not_found"), LLMNotFoundError, 1),
        (refuse(429), LLMBusyError, 2),
        (refuse(429, retry_after="0"), LLMBusyError, 2),
        (refuse(500), LLMUnavailableError, 2),
        (refuse(400), LLMRefusedError, 1),
        (refuse(400, "x", "context_length_exceeded"), LLMContextError, 1),
        (refuse(400, "This model's maximum context length is 9 tokens."), LLMContextError, 1),
        (refuse(400, "the request exceeds the available context size"), LLMContextError, 1),
        (refuse(400, "prompt is too long: 9 tokens > 8 maximum"), LLMContextError, 1),
        (respond(413, "too large"), LLMContextError, 1),
        (refuse(404, "no model with this context length"), LLMNotFoundError, 1),
        (refuse(400, "x", "content_filter"), LLMFilterError, 1),
        (stream("a", finish_reason="content_filter"), LLMFilterError, 1),
        (respond(200, "<html>hello</html>"), LLMUnreadableError, 1),
        (respond(200, {"choices": []}), LLMUnreadableError, 1),
        (stream({"content": 5}), LLMUnreadableError, 1),
        (stream(*["a" * 1_000_000] * 5), LLMUnreadableError, 1),
        (parts([1]), LLMUnavailableError, 2),
        (parts(5), LLMUnavailableError, 2),
        (parts({"choices": {"a": 1}}), LLMUnreadableError, 1),
        (parts({"choices": [{"delta": "x"}]}), LLMUnreadableError, 1),
        (refuse(429, retry_after=f"Mon, 01 Jan 2024 00:00:00 +{'9' * 20}"), LLMBusyError, 2),
        (stream("a", cut=True), LLMUnavailableError, 2),
        (stream("a", finish_reason=None, ends=False), LLMUnavailableError, 2),
    ],
)
async def test_each_fault_has_its_error(behaviour: Behaviour, error: type[LLMError], tries: int) -> None:
    async with ChatServer([behaviour]) as server:
        client = client_of(settings_for(server.base_url, tries=2))
        with pytest.raises(error) as caught:
            await client.complete(REQUEST)
        await client.close()
    assert type(caught.value) is error and len(server.seen) == tries
    assert error.for_people and caught.value.code == error.code != LLMError.code


async def test_an_error_inside_the_stream_has_its_own_code() -> None:
    async def too_long(writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        await start_stream(writer)
        await send_event(writer, json.dumps({"error": {"message": "no", "code": "context_length_exceeded"}}))

    async with ChatServer([too_long]) as server:
        client = client_of(settings_for(server.base_url, tries=2))
        with pytest.raises(LLMContextError):
            await client.complete(REQUEST)
        await client.close()


async def test_a_web_page_instead_of_an_answer_is_an_error_that_names_the_setting() -> None:
    message, _ = await failure(respond(404, "<html>not here</html>"), stream=False)
    assert "NEKRO_LLM__BASE_URL" in message
    message, _ = await failure(respond(200, "<html>welcome</html>"), stream=False)
    assert "not a chat completion" in message


async def test_a_slow_first_token_times_out_and_is_retried() -> None:
    clock = LoopClock()

    async def is_late(*_: Any) -> None:
        await clock.forward(60)

    answer, _ = await ask(hold(is_late), stream("ok"), first_token_timeout_seconds=60)
    assert (answer.text, answer.tries) == ("ok", 2)


async def test_a_response_head_does_not_count_as_the_first_token() -> None:
    async def silent(writer: asyncio.StreamWriter, request: Any) -> None:
        await start_stream(writer)
        await send_chunk(writer, request, {"role": "assistant", "content": ""})

    message, _ = await failure(hold(silent), first_token_timeout_seconds=0.2, tries=1)
    assert "no token within 0.2 s" in message


async def test_reasoning_under_another_field_name_counts_as_tokens() -> None:
    clock = LoopClock()

    async def thinks(writer: asyncio.StreamWriter, request: Any) -> None:
        await start_stream(writer)
        await send_chunk(writer, request, {"reasoning_content": "hm"})
        await clock.forward(60)

    message, _ = await failure(hold(thinks), first_token_timeout_seconds=90, timeout_seconds=60, tries=1)
    assert "no complete answer within 60 s" in message


async def test_an_endless_answer_times_out() -> None:
    message, _ = await failure(hold(), stream=False, timeout_seconds=0.2, tries=2)
    assert "no complete answer within 0.2 s" in message


async def test_an_unreachable_server_is_named() -> None:
    async with ChatServer([]) as server:
        url = server.base_url
    client = client_of(settings_for(url, tries=2))
    with pytest.raises(LLMError, match="connection failed") as caught:
        await client.complete(REQUEST)
    assert url in str(caught.value)
    assert "after 2 tries" in str(caught.value)


async def test_passwords_in_the_url_stay_out_of_errors() -> None:
    async with ChatServer([refuse(400)]) as server:
        url = server.base_url.replace("http://", "http://me:hush@")
        client = client_of(settings_for(url))
        with pytest.raises(LLMError) as caught:
            await client.complete(REQUEST)
        await client.close()
    assert "hush" not in str(caught.value)


async def test_a_cancelled_request_closes_its_connection() -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def watch(_: asyncio.StreamWriter, request: SeenRequest) -> None:
        arrived.set()
        await request.reader.read()
        gone.set()

    async with ChatServer([watch]) as server:
        client = client_of(settings_for(server.base_url))
        asking = asyncio.create_task(client.complete(REQUEST))
        await asyncio.wait_for(arrived.wait(), WAIT_SECONDS)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await client.close()
        await asyncio.wait_for(gone.wait(), WAIT_SECONDS)


def test_the_client_works_on_uvloop() -> None:
    answer, _ = uvloop.run(ask(refuse(500), stream("ok")))
    assert answer.text == "ok"


async def test_each_request_is_recorded_without_its_key_and_with_images_shortened(tmp_path: Path) -> None:
    image = b"\x89PNG..."
    url = f"data:image/png;base64,{b64encode(image).decode()}"
    request = LLMRequest(
        messages=(
            PromptMessage(role=PromptRole.USER, parts=(TextPart(text="look \ud800"), ImagePart(url=url))),
        ),
        round_id="r7",
        chat_key="c:1",
    )
    record = tmp_path / "new" / "requests.jsonl"
    async with ChatServer([refuse(500), stream("x")]) as server:
        client = client_of(settings_for(server.base_url, record=record))
        await client.complete(request)
        await client.close()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["try"], line["model"], line["round_id"]) for line in lines] == [
        (1, "big", "r7"),
        (2, "big", "r7"),
    ]
    assert lines[0]["messages"][0]["content"][1] == {
        "type": "image_url",
        "image_url": {
            "media_type": "image/png",
            "bytes": len(image),
            "sha256": hashlib.sha256(image).hexdigest(),
        },
    }
    assert KEY not in record.read_text()
    assert record.stat().st_mode & 0o077 == 0


def test_missing_model_settings_are_named() -> None:
    with pytest.raises(LLMError, match="NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL"):
        create_client(LLMSettings())
    with pytest.raises(LLMError, match="NEKRO_LLM__MODEL"):
        create_client(LLMSettings(base_url="http://localhost:1/v1"))
    from nekro.agent.llm.endpoint_client import EndpointClient

    assert isinstance(create_client(LLMSettings(base_url="http://localhost:1/v1", model="m")), EndpointClient)


def test_the_retry_delay_of_the_endpoint_is_used() -> None:
    policy = RetryPolicy(tries=3, backoff_seconds=1, longest_seconds=100)
    pause = policy.pause_seconds(Fault(what="x", status=429, retry_after_seconds=7), 1)
    assert pause is not None
    assert 7 <= pause <= 8
    assert policy.pause_seconds(Fault(what="x", status=429, retry_after_seconds=101), 1) is None


async def test_a_retry_delay_of_the_endpoint_is_honoured_or_refused() -> None:
    answer, _ = await ask(refuse(429, retry_after="0"), stream("ok"))
    assert answer.tries == 2
    message, server = await failure(refuse(429, "later", retry_after="999"))
    assert len(server.seen) == 1
    assert "999" in message


def test_retry_delays_grow_with_jitter_up_to_the_maximum() -> None:
    policy = RetryPolicy(tries=100, backoff_seconds=1, longest_seconds=10)
    for failed, step in [(1, 1), (2, 2), (3, 4), (9, 10), (99, 10)]:
        pauses = {policy.pause_seconds(Fault(what="x"), failed) for _ in range(20)}
        assert all(pause is not None and step / 2 <= pause <= step for pause in pauses)
        assert len(pauses) > 1
    assert policy.pause_seconds(Fault(what="x"), 100) is None


async def spent_on(*behaviours: Behaviour, **overrides: Any) -> list[ModelSpent]:
    """Send a request; returns what it reports as used, also if it fails."""
    spent: list[ModelSpent] = []
    async with ChatServer(list(behaviours)) as server:
        client = client_of(settings_for(server.base_url, **overrides))
        with contextlib.suppress(LLMError):
            await client.complete(replace(REQUEST, on_spent=spent.append))
        await client.close()
    return spent


async def test_each_request_reports_what_it_used() -> None:
    # A refused request costs nothing; one that was cut off costs its prompt and what arrived, estimated.
    behaviours = refuse(500), stream("print(1)\n" * 50, cut=True), stream("x")
    refused, cut, answered = await spent_on(*behaviours)
    assert (refused.prompt_tokens, refused.answer_tokens, refused.cost) == (0, 0, 0)
    assert 0 < cut.prompt_tokens < 50 and 50 < cut.answer_tokens < 1000 and cut.cost > 0
    assert answered == ModelSpent(
        group="default", model="big", prompt_tokens=1000, answer_tokens=200, cost=pytest.approx(0.004)
    )
    assert refused.model == "big"


async def test_a_cancelled_request_reports_what_it_sent() -> None:
    spent: list[ModelSpent] = []
    asked = asyncio.Event()

    async def hang(_: asyncio.StreamWriter, __: SeenRequest) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with ChatServer([hang]) as server:
        client = client_of(settings_for(server.base_url))
        work = asyncio.create_task(client.complete(replace(REQUEST, on_spent=spent.append)))
        await asked.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await client.close()
    assert [(one.prompt_tokens > 0, one.answer_tokens) for one in spent] == [(True, 0)]


async def test_an_endpoint_without_usage_is_estimated() -> None:
    (spent,) = await spent_on(stream("print(1)\n" * 50, usage=False))
    assert spent.prompt_tokens > 0 and spent.answer_tokens > 50 and spent.cost > 0


async def _serve_many(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, stays_open: bool, waits: bool
) -> None:
    """Answer requests of one connection with a stream and a whole answer in turns."""
    number = 0
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        number += 1
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "delta": {"content": "Hi"},
            "message": {"content": "Hi"},
        }
        body = json.dumps({"model": "big", "choices": [choice]})
        if number % 2:
            events = f"data: {body}\n\ndata: [DONE]\n\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
            writer.write(f"{len(events):x}\r\n".encode() + events + b"\r\n")
            if waits:
                await writer.drain()
                await asyncio.sleep(0.01)
            if stays_open:
                await asyncio.Event().wait()
            writer.write(b"0\r\n\r\n")
        else:
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "a moment later"])
async def test_requests_share_a_connection(waits: bool) -> None:
    """A new one would cost each round the handshakes of TCP and TLS."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await _serve_many(reader, writer, stays_open=False, waits=waits)

    async with StreamServer(serve) as server:
        client = client_of(settings_for(f"http://127.0.0.1:{server.port}/v1"))
        for _ in range(4):
            assert (await client.complete(REQUEST)).text == "Hi"
        await client.close()
    assert connections == 1


async def test_a_stream_that_stays_open_after_its_end_holds_up_no_answer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await _serve_many(reader, writer, stays_open=True, waits=False)

    async with StreamServer(serve) as server:
        client = client_of(settings_for(f"http://127.0.0.1:{server.port}/v1"))
        for _ in range(2):
            assert (await client.complete(REQUEST)).text == "Hi"
        await client.close()
