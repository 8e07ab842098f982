"""Sends one small request to the model of a group, to see whether it answers."""

from __future__ import annotations

import time
from typing import Final

import openai

from agent.llm.factory import endpoint_of
from agent.llm.faults import ENDPOINT_ERRORS, fault_of, hint_of
from agent.llm.openai_client import OpenAIClient
from agent.llm.port import LLMRequest
from agent.model import ImagePart, Part, PromptMessage, Role, TextPart
from broker_config.model_groups import ModelGroup
from broker_config.settings import LLMSettings
from nekro_agent.errors import LLMError, NekroError

__all__ = ["try_group"]

_QUESTION: Final = "Answer with the one word: yes"
#: A white PNG of 8 by 8 pixels.
_PICTURE: Final = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR42mP4TwAwDC0FBBEAnnG/QZIXuV0AAAAASUVORK5CYII="
)


async def try_group(llm: LLMSettings, group: ModelGroup) -> dict[str, object]:
    """Send one request without further tries and return what came of it.

    Returns:
        ``group``, ``model``, ``kind`` (chat, vision, embedding), ``ok``, ``first_token_seconds``,
        ``seconds``, ``input_tokens``, ``output_tokens``, ``error`` and ``code``; None is what does not apply
        or what the endpoint does not report.
    """
    kind = "embedding" if group.embedding else "vision" if group.vision else "chat"
    result: dict[str, object] = {
        "group": group.name,
        "model": group.model,
        "kind": kind,
        "ok": True,
        "first_token_seconds": None,
        "seconds": None,
        "input_tokens": None,
        "output_tokens": None,
        "error": None,
        "code": None,
    }
    ask = _embed if group.embedding else _chat
    began = time.monotonic()
    try:
        result |= await ask(llm, group)
    except NekroError as exc:
        result |= {"ok": False, "error": str(exc), "code": exc.code}
    return result | {"seconds": round(time.monotonic() - began, 3)}


async def _chat(llm: LLMSettings, group: ModelGroup) -> dict[str, object]:
    settings = endpoint_of(llm, group).model_copy(update={"tries": 1, "record": None, "script": None})
    client = OpenAIClient(settings, group=group.name)
    picture: tuple[Part, ...] = (ImagePart(url=_PICTURE),) if group.vision else ()
    message = PromptMessage(role=Role.USER, parts=(TextPart(text=_QUESTION), *picture))
    began = time.monotonic()
    first: list[float] = []

    def on_delta(_number: int, _text: str) -> None:
        if not first:
            first.append(round(time.monotonic() - began, 3))

    try:
        answer = await client.complete(LLMRequest(messages=(message,), on_delta=on_delta))
    finally:
        await client.close()
    return {
        "model": answer.model,
        "first_token_seconds": first[0] if first and settings.stream else None,
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.answer_tokens,
    }


async def _embed(llm: LLMSettings, group: ModelGroup) -> dict[str, object]:
    key = group.api_key.get_secret_value() if group.api_key else ""
    http = openai.DefaultAsyncHttpxClient(proxy=group.proxy) if group.proxy else None
    async with openai.AsyncOpenAI(
        base_url=group.base_url,
        api_key=key or "none",
        max_retries=0,
        timeout=llm.timeout_seconds,
        http_client=http,
    ) as client:
        try:
            answer = await client.embeddings.create(
                model=group.model, input=_QUESTION, extra_body=dict(group.parameters)
            )
            if not answer.data or not answer.data[0].embedding:
                raise LLMError(f"model {group.model} returned no embedding")
        except ENDPOINT_ERRORS as exc:
            fault = fault_of(exc, lambda error: str(error).replace(key, "***") if key else str(error))
            raise fault.error(f"{fault.what}{hint_of(fault, group.name)}") from exc
    return {"model": answer.model, "input_tokens": answer.usage.prompt_tokens}
