"""Model groups against real servers: which one answers, which one is asked first, and what is sent to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_server import (
    Behaviour,
    ChatServer,
    complete,
    hold,
    refuse,
    respond,
    send_chunk,
    start_stream,
    stream,
)
from pydantic import SecretStr

from broker_config.model_groups import ModelGroup, ModelGroupSettings
from broker_config.settings import LLMSettings, Settings
from nekro.agent.llm import LLMClient, LLMRequest
from nekro.agent.llm.clients import BREAKER_SECONDS, ModelRouter, endpoint_of
from nekro.agent.model import ImagePart, PromptMessage, PromptRole, TextPart
from nekro_agent.errors import LLMAccessError, LLMError, LLMTimeoutError

REQUEST = LLMRequest(messages=(PromptMessage.of(PromptRole.USER, "Hello"),), chat_key="c:1")
#: Limit of a group that does not answer, and of one that must on a busy machine.
FALLBACK_SECONDS = 3.0
KEY = "sk-very-secret"


class World:
    """A router over one server per group; the clock stands still."""

    def __init__(self, settings: Settings, servers: dict[str, ChatServer]) -> None:
        self.servers = servers
        self.now = 0.0
        self._llm = settings.llm
        self.router = ModelRouter(settings, self._create, clock=lambda: self.now)

    def _create(self, group: ModelGroup) -> LLMClient:
        from nekro.agent.llm.endpoint_client import EndpointClient

        return EndpointClient(endpoint_of(self._llm, group), group=group.name, backoff_seconds=0.001)

    def asked(self) -> dict[str, int]:
        return {name: len(server.seen) for name, server in self.servers.items()}


@asynccontextmanager
async def world(
    groups: dict[str, Behaviour], fields: dict[str, dict[str, Any]] | None = None, **llm: Any
) -> AsyncIterator[World]:
    """Groups in the order of their fallbacks; the first is ``default``."""
    servers = {name: ChatServer([behaviour]) for name, behaviour in groups.items()}
    for server in servers.values():
        await server.__aenter__()
    others = [name for name in groups if name != "default"]
    settings = Settings(
        llm=LLMSettings(
            base_url=servers["default"].base_url, model="main", api_key=SecretStr(KEY), tries=1,
            **({"fallbacks": tuple(others)} | llm),
        ),
        models={
            name: ModelGroupSettings(
                model=f"{name}-model", base_url=servers[name].base_url, **(fields or {}).get(name, {})
            )
            for name in others
        },
    )  # fmt: skip
    made = World(settings, servers)
    try:
        yield made
    finally:
        await made.router.close()
        for server in servers.values():
            await server.__aexit__()


@pytest.mark.parametrize(
    ("behaviour", "code", "llm"),
    [
        (refuse(401), "llm_access", {}),
        (refuse(404), "llm_not_found", {}),
        (refuse(429), "llm_busy", {}),
        (refuse(400), "llm_refused", {}),
        (refuse(500), "llm_unavailable", {}),
        (refuse(400, "x", "context_length_exceeded"), "llm_context", {}),
        (refuse(400, "x", "content_filter"), "llm_filter", {}),
        (respond(200, "<html></html>"), "llm_unreadable", {}),
        (stream("half", cut=True), "llm_unavailable", {}),
        (hold(), "llm_timeout", {"first_token_timeout_seconds": FALLBACK_SECONDS}),
        (hold(), "llm_timeout", {"timeout_seconds": FALLBACK_SECONDS, "stream": False}),
    ],
)
async def test_each_fault_passes_the_request_to_the_fallback(
    behaviour: Behaviour, code: str, llm: dict[str, Any]
) -> None:
    good = complete("print(2)") if llm.get("stream") is False else stream("print(2)")
    async with world({"default": behaviour, "b": good}, **llm) as made:
        answer = await made.router.complete(REQUEST)
        assert (answer.text, answer.group, answer.tries) == ("print(2)", "b", 2)
        assert [(one.group, one.model, one.code) for one in answer.failed] == [("default", "main", code)]
        assert KEY not in str(answer.failed)
        assert KEY not in str(made.servers["b"].seen[0].headers)


async def test_groups_are_asked_in_order_and_all_are_named_when_none_answers() -> None:
    async with world({"default": refuse(401), "b": refuse(500), "c": refuse(404)}) as made:
        with pytest.raises(LLMAccessError) as failed:
            await made.router.complete(REQUEST)
        text = str(failed.value)
        assert text.index("group default: ") < text.index("group b: ") < text.index("group c: ")
        assert "check NEKRO_LLM__API_KEY" in text and "NEKRO_MODELS__C__MODEL" in text
        assert failed.value.tries == 3 and KEY not in text


async def test_a_group_that_failed_is_asked_last_until_its_time_is_over() -> None:
    async with world({"default": refuse(500), "b": stream("b")}) as made:
        await made.router.complete(REQUEST)
        await made.router.complete(REQUEST)
        assert made.asked() == {"default": 1, "b": 2}
        made.now = BREAKER_SECONDS
        made.servers["default"].behaviours = [stream("a")]
        assert (await made.router.complete(REQUEST)).group == "default"
        assert made.asked() == {"default": 2, "b": 2}


async def test_a_group_that_failed_is_asked_when_its_fallbacks_fail() -> None:
    async with world({"default": refuse(500), "b": stream("b")}) as made:
        await made.router.complete(REQUEST)
        made.servers["default"].behaviours = [stream("a")]
        made.servers["b"].behaviours = [refuse(500)]
        answer = await made.router.complete(REQUEST)
        assert (answer.group, [one.group for one in answer.failed]) == ("default", ["b"])


async def test_a_prompt_that_is_too_long_does_not_put_its_group_last() -> None:
    too_long = refuse(400, "x", "context_length_exceeded")
    async with world({"default": too_long, "b": stream("b")}) as made:
        await made.router.complete(REQUEST)
        made.servers["default"].behaviours = [stream("a")]
        assert (await made.router.complete(REQUEST)).group == "default"


async def test_a_request_names_its_group_and_an_unknown_one_is_answered_by_default() -> None:
    fields = {
        "b": {
            "api_key": SecretStr("sk-b"), "vision": False, "parameters": '{"top_k": 5}',
            "input_price": 3, "output_price": 5,
        },
        "e": {"embedding": True},
    }  # fmt: skip
    groups = {"default": stream("a"), "b": stream("b"), "e": stream("e")}
    async with world(groups, fields, fallbacks=(), parameters='{"temperature": 0.5}') as made:
        picture = ImagePart(url="data:image/png;base64,AAAA")
        message = PromptMessage(role=PromptRole.USER, parts=(TextPart(text="Look"), picture))
        answer = await made.router.complete(LLMRequest(messages=(message,), group="B"))
        assert (answer.group, answer.model, answer.cost) == ("b", "b-model-real", pytest.approx(0.004))
        seen = made.servers["b"].seen[0]
        assert seen.headers["authorization"] == "Bearer sk-b"
        assert seen.body["top_k"] == 5 and "temperature" not in seen.body
        content = "Look\n[left out: this model sees no images]"
        assert seen.body["messages"] == [{"role": "user", "content": content}]
        for name in ("gone", "e"):
            answer = await made.router.complete(LLMRequest(messages=(message,), group=name))
            assert answer.group == "default"
        assert made.servers["default"].seen[0].body["temperature"] == 0.5 and not made.servers["e"].seen


async def test_a_stream_that_pauses_for_too_long_is_ended_and_its_text_is_not_continued(
    tmp_path: Path,
) -> None:
    deltas: list[tuple[int, str]] = []
    request = LLMRequest(
        messages=REQUEST.messages, on_delta=lambda number, text: deltas.append((number, text))
    )
    record = tmp_path / "record.jsonl"
    async with world(
        {"default": _open("a"), "b": stream("b")}, idle_timeout_seconds=FALLBACK_SECONDS, record=record
    ) as made:
        answer = await made.router.complete(request)
        assert answer.failed[0].code == "llm_timeout"
        assert f"no further token within {FALLBACK_SECONDS:g} s" in answer.failed[0].error
    assert deltas == [(1, "a"), (2, "b")]
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["group"], line["model"]) for line in lines] == [("default", "main"), ("b", "b-model")]


def _open(text: str) -> Behaviour:
    """Send the beginning of a stream and keep it open."""

    async def begin(writer: Any, request: Any) -> None:
        await start_stream(writer)
        await send_chunk(writer, request, {"content": text})

    return hold(begin)


async def test_without_fallbacks_the_error_is_that_of_the_group() -> None:
    async with world({"default": hold()}, first_token_timeout_seconds=0.05) as made:
        with pytest.raises(LLMTimeoutError, match=r"^no answer from model main .* no token within 0.05 s"):
            await made.router.complete(REQUEST)


def test_without_a_default_model_the_router_does_not_start() -> None:
    from nekro.agent.llm.clients import create_models

    with pytest.raises(LLMError, match="no language model is configured"):
        create_models(Settings())
