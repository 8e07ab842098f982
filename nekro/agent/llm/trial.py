"""Sends one small request to the model of a group, to see whether it answers."""

from __future__ import annotations

import time
from typing import Final

import httpx

from broker_config.model_groups import ModelGroup
from broker_config.settings import LLMSettings
from nekro.agent.llm.attempt import Fault
from nekro.agent.llm.clients import endpoint_of
from nekro.agent.llm.endpoint_client import EndpointClient
from nekro.agent.llm.port import LLMRequest
from nekro.agent.llm.reading import fault_of_response, fault_of_transport, hint_of
from nekro.agent.model import ImagePart, Part, PromptMessage, PromptRole, TextPart
from nekro_agent.errors import LLMError, NekroError
from nekro_agent.services.agent.openai import token_count
from nekro_client.answer_limits import limited

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
        ``group``, ``model``, ``protocol``, ``kind`` (chat, vision, embedding), ``ok``,
        ``first_token_seconds``, ``seconds``, ``input_tokens``, ``output_tokens``, ``tokens_estimated``,
        ``quirks`` (parameters that the endpoint refuses), ``error`` and ``code``; None
        is what does not apply or what the endpoint does not report.
    """
    kind = "embedding" if group.embedding else "vision" if group.vision else "chat"
    result: dict[str, object] = {
        "group": group.name,
        "model": group.model,
        "protocol": group.protocol,
        "kind": kind,
        "ok": True,
        "first_token_seconds": None,
        "seconds": None,
        "input_tokens": None,
        "output_tokens": None,
        "tokens_estimated": False,
        "quirks": [],
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
    client = EndpointClient(settings, group=group.name)
    picture: tuple[Part, ...] = (ImagePart(url=_PICTURE),) if group.vision else ()
    message = PromptMessage(role=PromptRole.USER, parts=(TextPart(text=_QUESTION), *picture))
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
        "tokens_estimated": answer.is_estimated,
        "quirks": list(client.quirks),
    }


async def _embed(llm: LLMSettings, group: ModelGroup) -> dict[str, object]:
    key = group.api_key.get_secret_value() if group.api_key else ""

    def words(text: str) -> str:
        return text.replace(key, "***") if key else text

    headers = {"authorization": f"Bearer {key or 'none'}"}
    async with httpx.AsyncClient(
        headers=headers,
        timeout=llm.timeout_seconds,
        proxy=group.proxy,
        event_hooks=limited(),
    ) as client:
        try:
            body = {"model": group.model, "input": _QUESTION} | dict(group.parameters)
            response = await client.post(f"{(group.base_url or '').rstrip('/')}/embeddings", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise _error_of(fault_of_transport(exc, words), group.name) from exc
    if response.status_code != httpx.codes.OK:
        after = response.headers.get("retry-after")
        raise _error_of(fault_of_response(response.status_code, response.content, after, words), group.name)
    try:
        answer = response.json()
        if not answer["data"][0]["embedding"]:
            raise LookupError
    except (ValueError, LookupError, TypeError) as exc:
        raise LLMError(f"model {group.model} returned no embedding") from exc
    return {
        "model": answer.get("model", group.model),
        "input_tokens": token_count(answer.get("usage"), "prompt_tokens"),
    }


def _error_of(fault: Fault, group: str) -> LLMError:
    return fault.error(f"{fault.what}{hint_of(fault, group, path='/embeddings')}")
