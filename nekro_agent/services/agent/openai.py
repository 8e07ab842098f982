"""Requests to a language model from plugins, through an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from pydantic import BaseModel

from nekro_agent.errors import LLMError
from nekro_agent.services.agent.creator import OpenAIChatMessage

__all__ = ["OpenAIResponse", "gen_openai_chat_response", "gen_openai_embeddings"]


class OpenAIResponse(BaseModel):
    """A model's answer and its token counts."""

    response_content: str
    thought_chain: str = ""
    use_model: str = ""
    message_cnt: int = 0
    token_consumption: int = 0
    token_input: int = 0
    token_output: int = 0


async def gen_openai_chat_response(
    model: str,
    messages: Iterable[OpenAIChatMessage | Mapping[str, Any]],
    temperature: float | None = None,
    top_p: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    extra_body: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    api_key: str | None = None,
    base_url: str | None = None,
    max_wait_time: float | None = None,
    **unused: object,
) -> OpenAIResponse:
    """Send messages to a model and return its complete answer.

    Args:
        max_wait_time: seconds; None leaves it to the client.
        unused: options of the reference that have no counterpart (streaming, logging, proxies).

    Raises:
        LLMError: the endpoint refused or did not answer.
    """
    plain = [m.to_dict() if isinstance(m, OpenAIChatMessage) else dict(m) for m in messages]
    options = {
        "temperature": temperature,
        "top_p": top_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "extra_body": extra_body,
        "max_tokens": max_tokens,
    }
    given = {name: value for name, value in options.items() if value is not None}
    from openai import OpenAIError

    try:
        async with _client(api_key, base_url, max_wait_time) as client:
            answer = await client.chat.completions.create(model=model, messages=cast("Any", plain), **given)
    except OpenAIError as exc:
        raise LLMError(f"model {model} at {base_url or 'the default endpoint'}: {exc}") from exc
    message = answer.choices[0].message
    usage = answer.usage
    return OpenAIResponse(
        response_content=message.content or "",
        thought_chain=str(getattr(message, "reasoning_content", None) or ""),
        use_model=answer.model,
        message_cnt=len(plain),
        token_consumption=usage.total_tokens if usage else 0,
        token_input=usage.prompt_tokens if usage else 0,
        token_output=usage.completion_tokens if usage else 0,
    )


async def gen_openai_embeddings(
    model: str,
    input: str | list[str],
    dimensions: int | None = None,
    api_key: str | None = None,
    base_url: str | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  # the reference's name
    **unused: object,
) -> list[float]:
    """Return the embedding of a text (of the first one of a list).

    Args:
        timeout: seconds; None leaves it to the client.

    Raises:
        LLMError: the endpoint refused or did not answer.
    """
    from openai import OpenAIError

    given = {"dimensions": dimensions} if dimensions is not None else {}
    try:
        async with _client(api_key, base_url, timeout) as client:
            answer = await client.embeddings.create(model=model, input=input, **cast("Any", given))
    except OpenAIError as exc:
        raise LLMError(f"model {model} at {base_url or 'the default endpoint'}: {exc}") from exc
    return list(answer.data[0].embedding)


def _client(api_key: str | None, base_url: str | None, timeout_seconds: float | None) -> Any:
    # Imported here because the package takes a second to import and most plugins do not use a model.
    from openai import NOT_GIVEN, AsyncOpenAI

    return AsyncOpenAI(
        api_key=api_key or "none", base_url=base_url, timeout=timeout_seconds or NOT_GIVEN, max_retries=1
    )
