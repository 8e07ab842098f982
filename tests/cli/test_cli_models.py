"""`nekro models`: the test of groups against a real server, and the choice of a chat."""

from __future__ import annotations

import pytest
from chat_server import ChatServer, refuse, respond, stream
from pydantic import SecretStr

from broker_config.model_groups import ModelGroupSettings, model_group
from broker_config.settings import LLMSettings, Settings
from nekro.agent.llm.trial import try_group

KEY = "sk-very-secret"
EMBEDDED = {
    "object": "list", "model": "e-real", "usage": {"prompt_tokens": 5, "total_tokens": 5},
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}],
}  # fmt: skip


def settings_of(server: ChatServer) -> Settings:
    return Settings(
        llm=LLMSettings(base_url=server.base_url, model="main", api_key=SecretStr(KEY)),
        models={
            "blind": ModelGroupSettings(model="b", vision=False),
            "text": ModelGroupSettings(model="e", embedding=True),
        },
    )


async def test_a_chat_model_is_asked_with_a_picture_if_it_sees() -> None:
    async with ChatServer([stream("yes")]) as server:
        settings = settings_of(server)
        result = await try_group(settings.llm, model_group(settings, "default"))
        assert (result["ok"], result["model"], result["kind"]) == (True, "main-real", "vision")
        assert (result["input_tokens"], result["output_tokens"]) == (1000, 200)
        assert result["first_token_seconds"] is not None and result["error"] is None
        assert [part["type"] for part in server.seen[0].body["messages"][0]["content"]] == [
            "text",
            "image_url",
        ]
        assert (await try_group(settings.llm, model_group(settings, "blind")))["kind"] == "chat"
        assert isinstance(server.seen[1].body["messages"][0]["content"], str)


async def test_parameters_that_an_endpoint_refuses_are_named() -> None:
    async with ChatServer([refuse(400, "unknown field stream_options"), stream("yes")]) as server:
        settings = settings_of(server)
        result = await try_group(settings.llm, model_group(settings, "default"))
    assert (result["ok"], result["protocol"], result["quirks"]) == (True, "openai", ["stream_options"])


async def test_a_group_is_asked_in_its_own_protocol_and_its_quirks_are_named() -> None:
    refusal = refuse(400, "`temperature` is deprecated for this model.")
    message = {"content": [{"type": "text", "text": "yes"}], "stop_reason": "end_turn"}
    async with ChatServer([refusal, respond(200, message)]) as server:
        group = ModelGroupSettings(
            model="c", base_url=server.base_url, protocol="anthropic", parameters='{"temperature": 0.2}'
        )
        settings = Settings(models={"claude": group})
        result = await try_group(settings.llm, model_group(settings, "claude"))
    assert (result["ok"], result["protocol"], result["quirks"]) == (True, "anthropic", ["temperature"])
    assert result["tokens_estimated"] and result["input_tokens"]  # the message has no usage
    assert [part["type"] for part in server.seen[1].body["messages"][0]["content"]] == ["text", "image"]


async def test_an_embedding_model_is_asked_for_an_embedding() -> None:
    async with ChatServer([respond(200, EMBEDDED)]) as server:
        settings = settings_of(server)
        result = await try_group(settings.llm, model_group(settings, "text"))
        assert (result["ok"], result["kind"], result["input_tokens"]) == (True, "embedding", 5)
        assert server.seen[0].path == "/v1/embeddings"


@pytest.mark.parametrize("group", ["default", "text"])
async def test_a_fault_is_reported_once_and_without_the_key(group: str) -> None:
    async with ChatServer([refuse(401, f"wrong key {KEY}")]) as server:
        settings = settings_of(server)
        result = await try_group(settings.llm, model_group(settings, group))
        assert (result["ok"], result["code"], len(server.seen)) == (False, "llm_access", 1)
        assert "401" in str(result["error"]) and KEY not in str(result)
