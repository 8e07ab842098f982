"""Endpoints that accept a request and then say nothing, nothing more, or only that they are still there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_server import Behaviour, ChatServer, hold, send_raw, stream
from protocol_corpus import GOOD, START, STOP, end, event, part, text, thought

from broker_config.settings import LLMSettings
from nekro.agent.llm import LLMRequest
from nekro.agent.model import PromptMessage, PromptRole
from nekro_agent.errors import LLMTimeoutError

REQUEST = LLMRequest(messages=(PromptMessage.of(PromptRole.USER, "Hello"),))
#: Limit of a first token and of a pause; long enough for connections on a busy machine.
LIMIT_SECONDS = 4.0
COMMENT = ": keep-alive\n\n"
PING = event("ping")
WORD = 'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
NO_WORD = 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
GOOD_OF = {
    "openai": stream("Hello"),
    "anthropic": send_raw(START + text() + end() + STOP),
    "gemini": send_raw(GOOD),
}


def repeat(begin: str, again: str) -> Behaviour:
    """Send a beginning, and then the same for ever."""

    async def behave(writer: asyncio.StreamWriter, request: Any) -> None:
        await send_raw(begin)(writer, request)
        while True:
            writer.write(again.encode())
            await writer.drain()
            await asyncio.sleep(0.02)

    return behave


HANGS: dict[str, list[tuple[Behaviour, str]]] = {
    "openai": [
        (hold(), "no token"),
        (hold(send_raw("")), "no token"),
        (hold(send_raw('{"choices": [')), "no token"),
        (hold(send_raw(WORD)), "no further token"),
        (repeat("", COMMENT), "no token"),
        (repeat("", NO_WORD), "no token"),
        (repeat("", "data: null\n\n"), "no token"),
        (repeat("", "retry: 1\n"), "no token"),
        (repeat(WORD, COMMENT), "no further token"),
        (repeat(WORD, NO_WORD), "no further token"),
    ],
    "anthropic": [
        (hold(send_raw(START)), "no token"),
        (hold(send_raw(START + thought())), "no further token"),
        (repeat(START, PING), "no token"),
        (repeat(START + text("Hel"), PING), "no further token"),
    ],
    "gemini": [
        (hold(send_raw("")), "no token"),
        (repeat(part({"text": "Hel"}), COMMENT), "no further token"),
        (repeat("", part({"text": ""})), "no token"),
    ],
}


@pytest.mark.extended
@pytest.mark.parametrize("protocol", HANGS)
async def test_an_endpoint_that_hangs_is_left_and_asked_again(protocol: str) -> None:
    hangs = HANGS[protocol]
    good = GOOD_OF[protocol]
    failed = await asyncio.gather(*(ask(protocol, 1, hang) for hang, _ in hangs))
    for (_, words), error in zip(hangs, failed, strict=True):
        assert f"{words} within {LIMIT_SECONDS:g} s" in error
    answers = await asyncio.gather(*(ask(protocol, 2, hang, good) for hang, _ in hangs))
    assert answers == ["Hello"] * len(hangs)


async def ask(protocol: str, tries: int, *behaviours: Behaviour) -> str:
    """Return the answer, or the error of a limit that was reached."""
    from nekro.agent.llm.endpoint_client import EndpointClient

    async with ChatServer(list(behaviours)) as server:
        settings = LLMSettings.model_validate(
            {"base_url": server.base_url, "protocol": protocol, "model": "m", "tries": tries}
            | {"first_token_timeout_seconds": LIMIT_SECONDS, "idle_timeout_seconds": LIMIT_SECONDS}
        )
        client = EndpointClient(settings, backoff_seconds=0.001)
        try:
            return (await client.complete(REQUEST)).text
        except LLMTimeoutError as exc:
            return str(exc)
        finally:
            await client.close()
