"""Responses of endpoints that were seen outside, over real HTTP, and what comes of each."""

from __future__ import annotations

import pytest
from chat_server import ChatServer, respond, stream
from endpoint_corpus import RESPONSES, Case, Cut
from protocol_corpus import RESPONSES as NATIVE
from waiting import WAIT_SECONDS

from broker_config.settings import LLMSettings
from nekro.agent.llm import LLMRequest
from nekro.agent.model import PromptMessage, PromptRole
from nekro_agent.errors import LLMError

pytestmark = pytest.mark.one_python

REQUEST = LLMRequest(messages=(PromptMessage.of(PromptRole.USER, "Hello"),))


@pytest.mark.parametrize("case", [*RESPONSES, *NATIVE], ids=lambda case: case.name)
async def test_a_response_leads_to_what_its_endpoint_meant(case: Case) -> None:
    from nekro.agent.llm.endpoint_client import EndpointClient

    async with ChatServer(list(case.responses)) as server:
        settings = LLMSettings(
            base_url=server.base_url,
            protocol=case.protocol,
            model="m",
            parameters='{"temperature": 0.5}' if case.protocol == "anthropic" else None,
            tries=2,
            idle_timeout_seconds=WAIT_SECONDS,
        )
        client = EndpointClient(settings, backoff_seconds=0.001)
        try:
            if isinstance(case.outcome, str):
                answer = await client.complete(REQUEST)
                assert (answer.text, answer.was_cut) == (case.outcome, isinstance(case.outcome, Cut))
            else:
                with pytest.raises(LLMError) as caught:
                    await client.complete(REQUEST)
                assert type(caught.value) is case.outcome
        finally:
            await client.close()
    assert len(server.seen) == case.requests


async def test_a_refused_parameter_is_not_sent_again() -> None:
    from nekro.agent.llm.endpoint_client import EndpointClient

    refusal = {
        "error": {"message": "Unsupported parameter: use 'max_completion_tokens'", "param": "max_tokens"}
    }
    hot = {"error": {"message": "Unsupported value: 'temperature' does not support 0.5."}}
    async with ChatServer([respond(400, refusal), respond(400, hot), stream("a"), stream("b")]) as server:
        settings = LLMSettings(
            base_url=server.base_url, model="m", parameters='{"temperature": 0.5}', max_output_tokens=9
        )
        client = EndpointClient(settings)
        try:
            texts = [(await client.complete(REQUEST)).text for _ in range(2)]
        finally:
            await client.close()
    assert (texts, client.quirks) == (["a", "b"], ("max_tokens", "temperature"))
    names = {"max_tokens", "max_completion_tokens", "temperature"}
    assert [names & request.body.keys() for request in server.seen] == [
        {"max_tokens", "temperature"},
        {"max_completion_tokens", "temperature"},
        {"max_completion_tokens"},
        {"max_completion_tokens"},
    ]


async def test_an_operator_reads_an_error_that_is_no_object() -> None:
    from nekro.agent.llm.endpoint_client import EndpointClient

    async with ChatServer(
        [respond(400, [{"error": {"message": "the sky is low"}}]), respond(400, {"error": "no luck"})]
    ) as server:
        client = EndpointClient(LLMSettings(base_url=server.base_url, model="m"))
        try:
            for words in ("status 400: the sky is low", "status 400: no luck"):
                with pytest.raises(LLMError, match=words):
                    await client.complete(REQUEST)
        finally:
            await client.close()
