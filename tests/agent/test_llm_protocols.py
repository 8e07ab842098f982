"""What is sent to endpoints of Anthropic and Gemini, and what the client takes from their answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from chat_server import Behaviour, ChatServer, respond, send_raw, stream
from endpoint_corpus import events
from protocol_corpus import GOOD, START, STOP, USAGE, end, event, failed, part, status, text, thought
from pydantic import SecretStr

from broker_config.model_groups import ModelGroupSettings, model_group
from broker_config.settings import LLMSettings, Settings
from nekro.agent.answers.replies import ReplyKind, read_reply
from nekro.agent.llm import LLMAnswer, LLMRequest
from nekro.agent.llm.protocols import PROTOCOLS, Options
from nekro.agent.llm.telemetry import Endpoint
from nekro.agent.model import ImagePart, PromptMessage, PromptRole, TextPart
from nekro_agent.errors import LLMError, LLMRefusedError

KEY = "sk-very-secret"
PICTURE = "data:image/png;base64,iVBORw0KGgo="
MESSAGES = (
    PromptMessage.of(PromptRole.SYSTEM, "Be brief."),
    PromptMessage.of(PromptRole.USER, "Look"),
    PromptMessage(role=PromptRole.USER, parts=(ImagePart(url=PICTURE), TextPart(text=" \n"))),
    PromptMessage.of(PromptRole.ASSISTANT, "print(1)  \n"),
    PromptMessage(
        role=PromptRole.USER, parts=(TextPart(text="On \ud800"), ImagePart(url="https://x.org/a.webp"))
    ),
)
REQUEST = LLMRequest(messages=MESSAGES, round_id="r1", chat_key="c:1")
HOT = "`temperature` is deprecated for this model."
EXTRA = "temperature: Extra inputs are not permitted"
TOOL = event("content_block_start", index=0, content_block={"type": "tool_use", "name": "f"})
CLAUDE = events(START, text("print(1)"), end(), STOP)
GEMINI = events(GOOD)


async def ask(
    protocol: str, *behaviours: Behaviour, request: LLMRequest = REQUEST, path: str = "", **fields: Any
) -> tuple[LLMAnswer, ChatServer, tuple[str, ...]]:
    """Ask once; returns the answer, the server and the quirks."""
    from nekro.agent.llm.endpoint_client import EndpointClient

    async with ChatServer(list(behaviours)) as server:
        base_url = server.base_url.removesuffix("/v1") + path
        values = {"base_url": base_url, "protocol": protocol, "model": "m", "api_key": SecretStr(KEY)}
        client = EndpointClient(LLMSettings(**(values | fields)), backoff_seconds=0.001)
        try:
            return await client.complete(request), server, client.quirks
        finally:
            await client.close()


async def test_anthropic_gets_system_turns_pictures_and_a_limit() -> None:
    parameters = json.dumps({"temperature": 1.5, "stop": "END", "top_k": 5, "thinking": {"type": "adaptive"}})
    _, server, _ = await ask("anthropic", *CLAUDE, parameters=parameters)
    (seen,) = server.seen
    assert seen.path == "/v1/messages" and KEY not in seen.path
    assert (seen.headers["x-api-key"], seen.headers["anthropic-version"]) == (KEY, "2023-06-01")
    assert "authorization" not in seen.headers
    picture = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    assert seen.body == {
        "model": "m", "max_tokens": 8192, "system": "Be brief.", "stream": True, "temperature": 1.0,
        "stop_sequences": ["END"], "top_k": 5, "thinking": {"type": "adaptive"},
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Look"}, {"type": "image", "source": picture}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "print(1)"}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "On ?"},
                    {"type": "image", "source": {"type": "url", "url": "https://x.org/a.webp"}},
                ],
            },
        ],
    }  # fmt: skip


async def test_gemini_gets_system_turns_pictures_and_its_configuration() -> None:
    parameters = json.dumps(
        {
            "stop": ["END"],
            "top_p": 0.5,
            "generationConfig": {"thinkingConfig": {"thinkingBudget": 0}},
            "labels": {},
            "temperature": 1.5,
        }
    )
    _, server, _ = await ask("gemini", *GEMINI, max_output_tokens=99, parameters=parameters)
    (seen,) = server.seen
    assert seen.path == "/v1beta/models/m:streamGenerateContent?alt=sse"
    assert seen.headers["x-goog-api-key"] == KEY and "authorization" not in seen.headers
    assert seen.body == {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {
                "role": "user",
                "parts": [
                    {"text": "Look"},
                    {"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}},
                ],
            },
            {"role": "model", "parts": [{"text": "print(1)  \n"}]},
            {
                "role": "user",
                "parts": [
                    {"text": "On ?"},
                    {"fileData": {"mimeType": "image/webp", "fileUri": "https://x.org/a.webp"}},
                ],
            },
        ],
        "generationConfig": {
            "temperature": 1.5, "maxOutputTokens": 99, "stopSequences": ["END"], "topP": 0.5,
            "thinkingConfig": {"thinkingBudget": 0},
        },
        "labels": {},
    }  # fmt: skip


@pytest.mark.parametrize("protocol", ["anthropic", "gemini"])
async def test_a_prompt_that_begins_with_an_answer_gets_a_message_before_it(protocol: str) -> None:
    messages = (PromptMessage.of(PromptRole.ASSISTANT, "Hi"), PromptMessage.of(PromptRole.SYSTEM, "Late"))
    request = LLMRequest(messages=messages)
    _, server, _ = await ask(protocol, *(CLAUDE if protocol == "anthropic" else GEMINI), request=request)
    sent = server.seen[0].body.get("messages") or server.seen[0].body["contents"]
    assert [turn["role"] for turn in sent] == [
        "user",
        "assistant" if protocol == "anthropic" else "model",
        "user",
    ]


@pytest.mark.parametrize(
    ("protocol", "path", "streams", "address"),
    [
        ("anthropic", "", True, "/v1/messages"),
        ("anthropic", "/v1/", True, "/v1/messages"),
        ("anthropic", "/api/anthropic", False, "/api/anthropic/v1/messages"),
        ("anthropic", "/claude/v1?tenant=a", True, "/claude/v1/messages?tenant=a"),
        ("gemini", "/v1beta", False, "/v1beta/models/m:generateContent"),
        ("gemini", "/proxy", True, "/proxy/v1beta/models/m:streamGenerateContent?alt=sse"),
        ("gemini", "/v1/projects/p/locations/l/publishers/google?a=b", True,
         "/v1/projects/p/locations/l/publishers/google/models/m:streamGenerateContent?a=b&alt=sse"),
        ("openai", "/openai/v1?api-version=x", True, "/openai/v1/chat/completions?api-version=x"),
    ],
)  # fmt: skip
def test_a_base_url_may_be_that_of_a_proxy(protocol: str, path: str, streams: bool, address: str) -> None:
    url = PROTOCOLS[protocol].url(f"https://h.org{path}", Options(model="m", stream=streams))
    assert url == f"https://h.org{address}"


def test_a_model_of_gemini_may_have_its_kind_in_its_name() -> None:
    url = PROTOCOLS["gemini"].url("https://h.org", Options(model="tunedModels/a b?c", stream=False))
    assert url == "https://h.org/v1beta/tunedModels/a%20b%3Fc:generateContent"


@pytest.mark.parametrize("protocol", ["openai", "anthropic", "gemini"])
async def test_a_key_does_not_follow_a_redirect_to_another_host(protocol: str) -> None:
    async with ChatServer([respond(404, "gone")]) as other:
        moved = respond(308, "moved", location=f"{other.base_url}/x")
        with pytest.raises(LLMError) as caught:
            await ask(protocol, moved)
        assert len(other.seen) == 1 and KEY not in str(other.seen[0].headers)
        assert KEY not in str(caught.value)


@pytest.mark.parametrize("protocol", ["openai", "anthropic", "gemini"])
async def test_a_key_follows_a_redirect_on_its_own_host(protocol: str) -> None:
    good = {"openai": (stream("x"),), "anthropic": CLAUDE, "gemini": GEMINI}[protocol]
    _, server, _ = await ask(protocol, respond(308, "moved", location="/x/"), *good)
    assert [KEY in str(seen.headers) for seen in server.seen] == [True, True]
    assert server.seen[1].path == "/x/"


@pytest.mark.parametrize("protocol", ["anthropic", "gemini"])
async def test_an_error_does_not_repeat_the_key(protocol: str) -> None:
    with pytest.raises(LLMRefusedError) as caught:
        await ask(protocol, respond(400, f"no {KEY}"))
    assert "status 400: no ***" in str(caught.value)


async def test_tokens_of_anthropic_include_those_of_its_cache() -> None:
    usage = {
        "input_tokens": 10, "cache_creation_input_tokens": 300, "cache_read_input_tokens": 600,
        "output_tokens": 1,
    }  # fmt: skip
    start = event("message_start", message={"id": "m1", "model": "claude-real", "usage": usage})
    prices = {
        "input_price_per_million": 1,
        "cached_input_price_per_million": 0.1,
        "output_price_per_million": 2,
    }
    answer, _, _ = await ask("anthropic", *events(start, text(), end(), STOP), **prices)
    assert (answer.model, answer.prompt_tokens, answer.answer_tokens) == ("claude-real", 910, 12)
    assert answer.cost == pytest.approx((310 + 60 + 24) / 1_000_000)


async def test_a_last_event_may_correct_the_tokens_of_the_first() -> None:
    # Proxies that do not know them at the start send zeros.
    start = event("message_start", message={"usage": {"input_tokens": 0, "output_tokens": 0}})
    last = event(
        "message_delta", delta={"stop_reason": "end_turn"}, usage={"input_tokens": 19, "output_tokens": 3}
    )
    answer, _, _ = await ask("anthropic", *events(start, text(), last, STOP))
    assert (answer.prompt_tokens, answer.answer_tokens) == (19, 3)


async def test_tokens_of_gemini_include_thoughts() -> None:
    usage = USAGE | {"thoughtsTokenCount": 8, "cachedContentTokenCount": 5}
    answer, _, _ = await ask(
        "gemini",
        *events(part({"text": "x"}, finish="STOP", usageMetadata=usage)),
        input_price_per_million=1,
        cached_input_price_per_million=0,
        output_price_per_million=0,
    )
    assert (answer.model, answer.prompt_tokens, answer.answer_tokens) == ("gemini-x", 9, 20)
    assert answer.cost == pytest.approx(4 / 1_000_000)


@pytest.mark.parametrize(
    ("protocol", "sent"),
    [
        ("anthropic", (START, thought(), text("Hel"), text("lo"), end(), STOP)),
        ("gemini", (part({"text": "Secret.", "thought": True}), GOOD)),
    ],
)
async def test_words_are_passed_on_as_they_come_and_thoughts_are_not(
    protocol: str, sent: tuple[str, ...]
) -> None:
    pieces: list[str] = []
    request = replace(REQUEST, on_delta=lambda _, piece: pieces.append(piece))
    answer, _, _ = await ask(protocol, *events(*sent), request=request)
    assert (pieces, answer.text) == (["Hel", "lo"], "Hello")


@pytest.mark.parametrize(
    ("protocol", "refusal", "quirk", "name"),
    [
        ("anthropic", failed(400, "x", HOT), "temperature", "temperature"),
        ("anthropic", failed(400, "x", EXTRA), "temperature", "temperature"),
        ("gemini", status(400, "X", "Developer instruction is not enabled for this model"), "system",
         "systemInstruction"),
    ],
)  # fmt: skip
async def test_what_an_endpoint_refuses_is_left_out_and_named(
    protocol: str, refusal: Behaviour, quirk: str, name: str
) -> None:
    good = CLAUDE if protocol == "anthropic" else GEMINI
    _, server, quirks = await ask(protocol, refusal, *good, parameters='{"temperature": 0.5}')
    assert quirks == (quirk,)
    assert [name in seen.body for seen in server.seen] == [True, False]
    if quirk == "system":
        assert server.seen[1].body["contents"][0]["parts"][0]["text"] == "Be brief.\nLook"


async def test_a_model_of_anthropic_with_short_answers_gets_a_lower_limit() -> None:
    refusal = failed(
        400, "x", "max_tokens: 8192 > 4096, which is the maximum allowed number of output tokens"
    )
    _, server, quirks = await ask("anthropic", refusal, *CLAUDE)
    assert ([seen.body["max_tokens"] for seen in server.seen], quirks) == ([8192, 4096], ("max_tokens",))


async def test_a_refusal_of_a_role_puts_instructions_into_the_first_message() -> None:
    refusal = respond(400, {"error": {"message": "System role not supported"}})
    good = send_raw(
        f"data: {json.dumps({'choices': [{'delta': {'content': 'x'}, 'finish_reason': 'stop'}]})}\n\n"
    )
    _, server, quirks = await ask("openai", refusal, good, path="/v1")
    assert quirks == ("system",)
    assert [seen.body["messages"][0]["role"] for seen in server.seen] == ["system", "user"]


@pytest.mark.parametrize(
    ("protocol", "sent"),
    [
        ("anthropic", (START, TOOL, end("tool_use"), STOP)),
        ("gemini", (part({"functionCall": {"name": "f", "args": {}}}, finish="STOP"),)),
        ("gemini", (part(finish="MALFORMED_FUNCTION_CALL"),)),
    ],
)  # fmt: skip
async def test_a_call_of_a_tool_is_answered_as_such(protocol: str, sent: tuple[str, ...]) -> None:
    answer, _, _ = await ask(protocol, *events(*sent))
    assert read_reply(answer, ()).kind is ReplyKind.TOOL_CALL


async def test_without_a_key_no_header_of_a_key_is_sent() -> None:
    for protocol, good in (("anthropic", CLAUDE), ("gemini", GEMINI)):
        _, server, _ = await ask(protocol, *good, api_key=None)
        assert not {"x-api-key", "x-goog-api-key", "authorization"} & server.seen[0].headers.keys()


def test_spans_name_the_provider_of_the_protocol() -> None:
    for name, provider in (("anthropic", "anthropic"), ("gemini", "gcp.gemini"), ("openai", "openai")):
        assert Endpoint.of("http://127.0.0.1:1", protocol=PROTOCOLS[name].provider).provider == provider
    assert Endpoint.of("https://api.x.ai/v1", protocol="anthropic").provider == "x_ai"


def test_a_group_without_an_address_speaks_the_protocol_of_the_default_one() -> None:
    settings = Settings(
        llm=LLMSettings(base_url="http://a", model="m", protocol="anthropic"),
        models={
            "same": ModelGroupSettings(model="b"),
            "other": ModelGroupSettings(model="c", base_url="http://b"),
            "own": ModelGroupSettings(model="d", base_url="http://c", protocol="gemini"),
            "vectors": ModelGroupSettings(model="e", embedding=True),
        },
    )
    found = {name: model_group(settings, name).protocol for name in ("same", "other", "own", "vectors")}
    assert found == {"same": "anthropic", "other": "openai", "own": "gemini", "vectors": "openai"}


def test_an_embedding_group_speaks_openais_protocol() -> None:
    with pytest.raises(ValueError, match="EMBEDDING and DRAW need PROTOCOL=openai"):
        ModelGroupSettings(model="m", embedding=True, protocol="gemini")
