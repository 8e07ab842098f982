"""Bodies of requests, and what a person says in them.

Clients send what they have. Fields that choose how a model samples, and functions that the client offers,
have no effect: the agent's settings decide, and it calls the methods of its plugins. A request that cannot
be answered without them (`tool_choice` names a function, or requires one) is refused.

Front ends also ask for themselves, such as for a title of a conversation, and add notes to messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from loguru import logger
from pydantic import AfterValidator, BaseModel, ConfigDict

from nekro.extensions.openai.chats import APIError
from nekro.operations.posting import MOST_PARTS
from nekro_client.models import Body, NewFilePart, NewImagePart, NewPart, NewTextPart

__all__ = [
    "CompletionBody",
    "ResponseBody",
    "is_note",
    "is_task",
    "newest_message",
    "newest_text_or_items",
]


#: How the questions begin, and what else they have; the defaults of published front ends.
_OF_THE_USER: Final[tuple[tuple[str, ...], ...]] = (
    # Open WebUI: titles, tags, follow-ups, searches, completions of what is typed; summaries; emoji; merges.
    ("### Task:", "<chat_history>", "</chat_history>"),
    ("### Task:", "### Messages Being Compacted:", "### Recent Messages Kept In Context:"),
    ("Your task is to reflect the speaker's likely facial expression", "Message: ```"),
    ("You have been provided with a set of responses from various models to the latest user query: ",),
    # LibreChat: titles.
    ("Provide a concise, 5-word-or-less title for the conversation", "\nConversation:\n"),
    ("Analyze this conversation and provide:\n1. The detected language", "\n2. A concise title"),
    # Continue: titles.
    ("Given the following... please reply with a title for the chat",),
    ("Given the following... please reply with a short summary that is 4-12 words",),
)

_OF_THE_SYSTEM: Final[tuple[tuple[str, ...], ...]] = (
    # Cherry Studio: titles.
    ("Summarize the given session as a 10-word title using user language",),
    ("将给定的对话总结为一个10字以内的标题，使用用户语言",),
    ("You are an assistant skilled in conversation. You need to summarize the user's conversation into",),
)


def is_task(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a front end asks about a conversation, for itself.

    Most do so by one message with their instructions and the conversation; some by a system message.
    """
    said = [message for message in messages if message.get("role") not in ("system", "developer")]
    if len(said) == 1 and said[0].get("role") == "user" and _is_one_of(_OF_THE_USER, said[0]):
        return True
    return bool(messages) and messages[0].get("role") == "system" and _is_one_of(_OF_THE_SYSTEM, messages[0])


def is_note(text: str) -> bool:
    """Whether a part of a message is Open WebUI's list of attached files, which is for its own tools."""
    text = text.strip()
    return text.startswith("<attached_files>") and text.endswith("</attached_files>")


def _is_one_of(tasks: Sequence[Sequence[str]], message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text")
    if not isinstance(content, str):
        return False
    text = content.strip()
    return any(text.startswith(begin) and all(map(text.count, rest)) for begin, *rest in tasks)


#: As the protocol limits metadata.
_MOST_PAIRS: Final = 16

_MOST_KEY_CHARS: Final = 64

_MOST_VALUE_CHARS: Final = 512
#: Most fields that a process names in its log; clients choose their names.
_MOST_NOTED: Final = 100

_noted: set[str] = set()


def _short(text: str) -> str:
    if len(text) > _MOST_VALUE_CHARS:
        raise ValueError(f"it has more than {_MOST_VALUE_CHARS} characters")
    return text


def _small(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > _MOST_PAIRS or any(len(key) > _MOST_KEY_CHARS for key in metadata):
        raise ValueError(
            f"it has more than {_MOST_PAIRS} pairs, or a name of more than {_MOST_KEY_CHARS} characters"
        )
    return metadata


#: It is stored; people write it, so it may have lone surrogates, which ``max_length`` refuses.
_Short = Annotated[str, AfterValidator(_short)]


class _Body(Body):
    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    stream: bool | None = None
    #: The person; the first of these that is stated.
    user: _Short | None = None
    safety_identifier: _Short | None = None
    prompt_cache_key: _Short | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    function_call: Any = None

    @property
    def person(self) -> str | None:
        """The person or conversation that the client states."""
        return self.user or self.safety_identifier or self.prompt_cache_key

    def refuse_demands(self) -> None:
        """Name fields without effect in the log, once in each process; raise if a function must be called."""
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "auto", "none"):
                what = "the agent calls its plugins' methods; it calls no functions of the client"
                raise _bad(name, f"{what}; leave it out, or set it to 'auto' or 'none'")
        without_effect = [*(self.model_extra or ()), *(["tools"] if self.tools or self.functions else [])]
        for name in without_effect[:_MOST_NOTED]:
            if name not in _noted and len(_noted) < _MOST_NOTED:
                _noted.add(name)
                logger.bind(field=ascii(name[:_MOST_KEY_CHARS])).info("openai_field_ignored")


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool | None = None


class CompletionBody(_Body):
    """Body of a chat completion."""

    messages: list[dict[str, Any]]
    n: int | None = None
    stream_options: StreamOptions | None = None


class Conversation(BaseModel):
    """A conversation by its id."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: _Short


class ResponseBody(_Body):
    """Body of a response."""

    input: str | list[dict[str, Any]]
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: _Short | Conversation | None = None
    metadata: Annotated[dict[str, _Short], AfterValidator(_small)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation, if one is stated."""
        stated = self.conversation
        return stated.id if isinstance(stated, Conversation) else stated


def newest_message(messages: Sequence[Mapping[str, Any]], *, param: str) -> list[NewPart]:
    """Return the parts of what the user said since the last answer; the rest is in the chat's history.

    Usually that is one message. Some clients send each picture as a message of its own before the text.

    Raises:
        APIError: the user said nothing, or one of the parts cannot be shown to the agent.
    """
    newest: list[int] = []
    for index in range(len(messages) - 1, -1, -1):
        role = messages[index].get("role")
        if role == "user":
            newest.append(index)
        elif role not in ("system", "developer") and newest:
            break
    if not newest:
        raise _bad(param, "there is no message of the role 'user'")
    if len(newest) > MOST_PARTS:
        raise _bad(param, f"more than {MOST_PARTS} messages of the user since the last answer")
    parts: list[NewPart] = []
    for index in reversed(newest):
        parts += _parts(messages[index].get("content"), param=f"{param}.{index}.content")
    if all(isinstance(part, NewTextPart) and not part.text.strip() for part in parts):
        raise _bad(f"{param}.{newest[0]}.content", "the message is empty")
    return parts


def newest_text_or_items(given: str | Sequence[Mapping[str, Any]]) -> list[NewPart]:
    """Return the parts of the newest message of the input of a response; errors as ``newest_message``."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return newest_message(given, param="input")


def _parts(content: object, *, param: str) -> list[NewPart]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or not content:
        raise _bad(param, "the content is neither a text nor a list of parts")
    if len(content) > MOST_PARTS:
        raise _bad(param, f"more than {MOST_PARTS} parts")
    parts = [_part(part, param=f"{param}.{index}") for index, part in enumerate(content)]
    return [part for part in parts if not (isinstance(part, NewTextPart) and is_note(part.text))] or parts


def _part(part: object, *, param: str) -> NewPart:
    if not isinstance(part, Mapping):
        raise _bad(param, "a part is an object with a type")
    kind = part.get("type")
    if kind in ("text", "input_text"):
        return NewTextPart(text=_text(part.get("text"), param=f"{param}.text"))
    if kind in ("image_url", "input_image"):
        return _image(part, param=param)
    if kind in ("file", "input_file"):
        inner = part.get("file") if kind == "file" else part
        return _file(inner if isinstance(inner, Mapping) else {}, param=param)
    raise _bad(f"{param}.type", f"parts of the type {kind!r} are not supported; use text, images and files")


def _image(part: Mapping[str, Any], *, param: str) -> NewPart:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if url is None and part.get("file_id"):
        return NewImagePart(file_id=_text(part["file_id"], param=f"{param}.file_id"))
    url = _text(url, param=f"{param}.image_url")
    if not url.startswith("data:"):
        # Fetching would let a client reach servers that only this host reaches.
        raise _bad(f"{param}.image_url", "send the image itself, as data:image/png;base64,…")
    return NewImagePart(data_url=url)


def _file(part: Mapping[str, Any], *, param: str) -> NewPart:
    name = part.get("filename")
    name = _text(name, param=f"{param}.filename") if name is not None else None
    if part.get("file_data") is not None:
        data = _text(part["file_data"], param=f"{param}.file_data")
        # Some clients send the content without the head of a data URL.
        url = data if data.startswith("data:") else f"data:application/octet-stream;base64,{data}"
        return NewFilePart(data_url=url, name=name)
    return NewFilePart(file_id=_text(part.get("file_id"), param=f"{param}.file_id"), name=name)


def _text(value: object, *, param: str) -> str:
    if not isinstance(value, str):
        raise _bad(param, "it must be a text")
    return value


def _bad(param: str, message: str) -> APIError:
    return APIError(HTTPStatus.BAD_REQUEST, "invalid_value", f"{param}: {message}", param=param)
