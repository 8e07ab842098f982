"""Spans and figures of model requests, against a real server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_server import Behaviour, ChatServer, complete, refuse, respond, stream
from prometheus_client import generate_latest
from pydantic import SecretStr
from recorded_spans import recorded_spans

from broker_config.settings import LLMSettings
from nekro.agent.llm import LLMRequest
from nekro.agent.llm.telemetry import Endpoint, provider_of
from nekro.agent.model import ImagePart, PromptMessage, PromptRole, TextPart
from nekro.base import metrics
from nekro.base.redaction import Redactor
from nekro_agent.errors import LLMError

pytestmark = pytest.mark.usefixtures("no_exporter")

KEY = "sk-very-secret"
IMAGE = "data:image/png;base64,iVBORw0KGgo="
REQUEST = LLMRequest(
    messages=(
        PromptMessage.of(PromptRole.SYSTEM, "Be brief."),
        PromptMessage(role=PromptRole.USER, parts=(TextPart(text=f"Hello {KEY}"), ImagePart(url=IMAGE))),
    ),
    round_id="r1",
    chat_key="c:1",
)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> metrics.Metrics:
    made = metrics.Metrics()
    monkeypatch.setattr(metrics, "_figures", made)
    return made


async def ask(*behaviours: Behaviour, capture: bool = False, **overrides: Any) -> list[Any]:
    """Ask once; returns the spans."""
    from nekro.agent.llm.endpoint_client import EndpointClient

    async with ChatServer(list(behaviours)) as server:
        values = {
            "base_url": server.base_url,
            "model": "big",
            "api_key": SecretStr(KEY),
            "parameters": '{"temperature": 0.5}',
        }
        prices = {"input_price_per_million": 2, "output_price_per_million": 10}
        client = EndpointClient(LLMSettings(**(values | prices | overrides)), backoff_seconds=0.001)
        with recorded_spans(capture_content=capture, redact=Redactor([KEY])) as spans:
            try:
                await client.complete(REQUEST)
            except LLMError:
                pass
            finally:
                await client.close()
    return spans


def plain(span: Any) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in span.attributes.items()
    }


async def test_a_request_has_the_attributes_of_the_conventions(figures: metrics.Metrics) -> None:
    (span,) = await ask(stream("print", "(1)"), max_output_tokens=99)
    found = plain(span)
    assert span.name == "chat big" and span.kind.name == "CLIENT"
    assert found.pop("server.port") > 0 and 0 < found.pop("gen_ai.response.time_to_first_chunk") < 60
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "big",
        "gen_ai.conversation.id": "c:1",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 99,
        "gen_ai.response.model": "big-real",
        "gen_ai.response.id": "c1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 1000,
        "gen_ai.usage.output_tokens": 200,
        "server.address": "127.0.0.1",
        "nekro.round_id": "r1",
        "nekro.group": "default",
        "nekro.try": 1,
        "nekro.cost": pytest.approx(0.004),
    }
    text = generate_latest(figures.registry).decode()
    labels = 'gen_ai_operation_name="chat",gen_ai_provider_name="openai",gen_ai_request_model="big"'
    assert f'gen_ai_client_token_usage_sum{{{labels},gen_ai_token_type="input"}} 1000.0' in text
    assert f'gen_ai_client_token_usage_sum{{{labels},gen_ai_token_type="output"}} 200.0' in text
    assert f"gen_ai_client_operation_time_to_first_chunk_seconds_count{{{labels}}} 1.0" in text
    assert 'gen_ai_client_operation_duration_seconds_count{error_type="",' + labels in text


async def test_each_try_is_a_span_and_a_failed_one_has_its_error_type(figures: metrics.Metrics) -> None:
    failed, good = await ask(refuse(503, "busy"), complete("x"), stream=False)
    assert not failed.status.is_ok and failed.attributes["nekro.try"] == 1
    assert failed.attributes["error.type"] == "LLMUnavailableError" and good.attributes["nekro.try"] == 2
    assert "busy" not in str(plain(failed)) and "gen_ai.usage.input_tokens" not in failed.attributes
    assert "gen_ai.response.time_to_first_chunk" not in good.attributes
    text = generate_latest(figures.registry).decode()
    assert 'operation_duration_seconds_count{error_type="LLMUnavailableError"' in text


async def test_texts_are_absent_by_default_and_the_key_always() -> None:
    (span,) = await ask(complete("secret plan"), stream=False)
    assert "Hello" not in str(plain(span)) and "plan" not in str(plain(span))
    (span,) = await ask(complete(f"plan {KEY}"), stream=False, capture=True)
    found = plain(span)
    assert KEY not in str(found) and "base64" not in str(found)
    system, user = json.loads(found["gen_ai.input.messages"])
    assert system == {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]}
    assert user["parts"][0] == {"type": "text", "content": "Hello [secret]"}
    assert user["parts"][1]["mime_type"] == "image/png" and user["parts"][1]["bytes"] == 8
    assert json.loads(found["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "plan [secret]"}],
            "finish_reason": "stop",
        }
    ]


async def test_names_from_an_endpoint_may_be_anything() -> None:
    body = {
        "id": 7, "object": "chat.completion", "created": 1, "model": "\ud800" + "m" * 1000,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
    }  # fmt: skip
    (span,) = await ask(respond(200, body), stream=False)
    assert span.attributes["gen_ai.response.model"] == "?" + "m" * 199
    assert "gen_ai.response.id" not in span.attributes


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("api.openai.com", "openai"),
        ("127.0.0.1", "openai"),
        ("api.deepseek.com", "deepseek"),
        ("notdeepseek.com", "openai"),
        ("x.ai", "x_ai"),
        ("me.openai.azure.com", "azure.ai.openai"),
    ],
)
def test_a_provider_is_known_by_its_host(host: str, name: str) -> None:
    from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import GenAiProviderNameValues

    assert provider_of(host) == name
    assert name in {item.value for item in GenAiProviderNameValues}


def test_an_endpoint_has_the_port_of_its_scheme() -> None:
    assert Endpoint.of("https://user:pw@api.x.ai/v1") == Endpoint(provider="x_ai", host="api.x.ai", port=443)
