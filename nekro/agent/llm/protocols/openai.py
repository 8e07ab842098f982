"""OpenAI's chat completions, which most endpoints speak.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from nekro.agent.llm.attempt import Gathered, dict_of, list_of, name_in, unreadable
from nekro.agent.llm.protocols.base import MAX_TOKENS, SYSTEM, TEMPERATURE, Options, refused, sendable
from nekro.agent.model import Part, PromptMessage, PromptRole, TextPart
from nekro_agent.services.agent.openai import token_count

__all__ = ["OpenAIProtocol"]

#: Sent when no key is configured: some local endpoints expect a key of any form.
_NO_KEY: Final = "none"
_STREAM_OPTIONS: Final = "stream_options"
#: Types of parts of a content list that are text for people; those of reasoning are not.
_TEXT_PARTS: Final = frozenset({"text", "output_text", "refusal"})
#: Fields of a message that endpoints send reasoning in.
_REASONING: Final = ("reasoning", "thinking", "thought")


class OpenAIProtocol:
    """See ``ChatProtocol``."""

    name = "openai"
    provider = "openai"
    path = "/chat/completions"

    def url(self, base_url: str, options: Options) -> str:
        """See ``ChatProtocol``."""
        return _below(base_url, self.path)

    def models_url(self, base_url: str) -> str:
        """See ``ChatProtocol``."""
        return _below(base_url, "/models")

    def headers(self, key: str) -> dict[str, str]:
        """See ``ChatProtocol``."""
        return {"authorization": f"Bearer {key or _NO_KEY}"}

    def body(
        self, messages: Iterable[PromptMessage], options: Options, quirks: Collection[str]
    ) -> dict[str, Any]:
        """See ``ChatProtocol``."""
        wire = [_wire(message, is_system=SYSTEM not in quirks) for message in messages]
        body: dict[str, Any] = {"model": options.model, "messages": wire}
        if options.temperature is not None and TEMPERATURE not in quirks:
            body["temperature"] = options.temperature
        if options.max_tokens is not None:
            name = "max_completion_tokens" if MAX_TOKENS in quirks else "max_tokens"
            body[name] = options.max_tokens
        if options.stream:
            body["stream"] = True
            if _STREAM_OPTIONS not in quirks:
                body["stream_options"] = {"include_usage": True}
        return body | dict(options.parameters)

    def quirk_of(self, refusal: bytes, body: Mapping[str, Any]) -> str | None:
        """See ``ChatProtocol``."""
        if _STREAM_OPTIONS in body and (b"stream_options" in refusal or b"include_usage" in refusal):
            return _STREAM_OPTIONS
        if "max_tokens" in body and b"max_completion_tokens" in refusal:
            return MAX_TOKENS
        return refused(refusal, has_temperature="temperature" in body)

    def read_event(self, event: dict[str, Any], gathered: Gathered) -> bool:
        """See ``ChatProtocol``."""
        has_usage = _note(event, gathered)
        choices = event.get("choices")
        if not choices:
            gathered.is_over = has_usage and bool(gathered.finish_reason)
            return False
        choice = _first(choices)
        finish_reason = name_in(choice, "finish_reason")
        gathered.finish_reason = finish_reason or gathered.finish_reason
        delta = choice.get("delta", choice.get("message"))
        if delta is not None and not isinstance(delta, dict):
            raise unreadable(f"a part of the answer is {type(delta).__name__} data")
        has_part = delta is not None and _add_message(delta, gathered)
        gathered.is_over = has_usage and bool(finish_reason)
        return bool(has_part or finish_reason)

    def read_whole(self, body: object, gathered: Gathered) -> None:
        """See ``ChatProtocol``."""
        if not isinstance(body, dict) or not body.get("choices"):
            raise unreadable("the response is not a chat completion")
        choice = _first(body["choices"])
        message = choice.get("message")
        if not isinstance(message, dict):
            raise unreadable(f"the answer's message is {type(message).__name__} data")
        _note(body, gathered)
        _add_message(message, gathered)
        gathered.finish_reason = name_in(choice, "finish_reason") or "stop"


def _below(base_url: str, path: str) -> str:
    """Return an address below the base URL; its query, such as Azure's version, stays."""
    parts = urlsplit(base_url)
    return parts._replace(path=parts.path.rstrip("/") + path).geturl()


def _wire(message: PromptMessage, *, is_system: bool) -> dict[str, Any]:
    """Return a message in the protocol's form; without images a plain string, which every server accepts."""
    role = message.role if is_system or message.role is not PromptRole.SYSTEM else PromptRole.USER
    if not message.images:
        return {"role": role.value, "content": sendable(message.text)}
    return {"role": role.value, "content": [_wire_part(part) for part in message.parts]}


def _wire_part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": sendable(part.text)}
    image = {"url": sendable(part.url)} | ({} if part.detail is None else {"detail": part.detail})
    return {"type": "image_url", "image_url": image}


def _note(source: dict[str, Any], gathered: Gathered) -> bool:
    """Note the model, the id and the usage that a response names; return whether it has a usage."""
    gathered.note_names(source)
    usage = source.get("usage")
    if not isinstance(usage, dict):
        return False
    gathered.prompt_tokens = token_count(usage, "prompt_tokens")
    gathered.cached_tokens = token_count(dict_of(usage.get("prompt_tokens_details")), "cached_tokens") or 0
    gathered.answer_tokens = token_count(usage, "completion_tokens")
    return True


def _add_message(message: dict[str, Any], gathered: Gathered) -> bool:
    """Add a message or a part of one; return whether there was text, reasoning or a call in it."""
    text, thinks = _text_of(message.get("content"))
    gathered.add(text)
    listed, old = message.get("tool_calls"), message.get("function_call")
    for call in list_of(listed):
        gathered.add_tool(dict_of(dict_of(call).get("function")).get("name"))
    gathered.add_tool(dict_of(old).get("name"))
    refusal = message.get("refusal")
    gathered.add(refusal if isinstance(refusal, str) else "", to=gathered.refusal)
    thinks = thinks or any(message[name] for name in message if any(word in name for word in _REASONING))
    return bool(text or refusal or listed or old or thinks)


def _text_of(content: object) -> tuple[str, bool]:
    """Return the text of a content, and whether it has reasoning: a string, None, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or "", False
    if not isinstance(content, list):
        raise unreadable(f"the answer's text is {type(content).__name__} data")
    texts: list[str] = []
    thinks = False
    for part in content:
        text = part if isinstance(part, str) else dict_of(part).get("text", dict_of(part).get("refusal"))
        if isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS:
            thinks = True
        elif isinstance(text, str):
            texts.append(text)
    return "".join(texts), thinks


def _first(choices: object) -> dict[str, Any]:
    if not isinstance(choices, list):
        raise unreadable(f"the list of answers is {type(choices).__name__} data")
    return dict_of(choices[0])
