"""What servers ask for during a call, as values; questions as texts for people, and people's answers.

It needs no SDK, so that workers without servers load none. Gateways and commands, which pass answers on, need
nothing else of the client.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from loguru import logger

from nekro.extensions.mcp.client.tools import line, quoted
from nekro_agent.errors import ArgumentError, InvalidValueError, NotFoundError

if TYPE_CHECKING:
    from storage.engine import Database

__all__ = [
    "ChatAnswers",
    "Completion",
    "Prompt",
    "Question",
    "QuestionReply",
    "answer_key",
    "answer_of",
    "answer_question",
    "content_of",
    "is_asked_by",
    "question_id",
    "shown_question",
]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A server's request to a language model."""

    #: In the form of OpenAI's chat API; every word is the server's.
    messages: list[dict[str, Any]]
    #: Longest answer, at most what the declaration allows.
    max_tokens: int
    temperature: float | None
    stop: list[str] | None
    #: Estimate of the tokens of ``messages``.
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A model's answer."""

    text: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A server's question to a person; every text is the server's."""

    server: str
    #: Name of the method that was called.
    tool: str
    text: str
    #: JSON schema of the fields of the answer, of simple types; None for a question with a URL.
    schema: Mapping[str, Any] | None = None
    #: Address that the person is asked to open.
    url: str | None = None
    #: Progress of the call so far.
    percent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QuestionReply:
    """What a person answered; ``cancel`` without an answer."""

    action: Literal["accept", "decline", "cancel"]
    content: dict[str, Any] | None = None


_MOST_TEXT_CHARS: Final = 1_500

_MOST_FIELDS: Final = 20
#: Of the descriptions of all fields.
_MOST_FIELD_CHARS: Final = 6_000

_MOST_CHOICES: Final = 50

_MOST_ANSWER_CHARS: Final = 16_000

_BOOLEANS: Final = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def shown_question(question: Question, question_id: str) -> str:
    """Return a question for people: who asks, its words quoted, the fields, and how to answer."""
    parts = [
        f"The MCP server {question.server} asks during the call of {question.tool} (question {question_id}). "
        "The quoted words are its own. Tell it no password and no key.",
        quoted(question.text, _MOST_TEXT_CHARS),
    ]
    if question.url is not None:
        host = line(_host_of(question.url), 200)
        parts.append(f"It asks you to open an address of {host}: {line(question.url, 2_000)}")
    else:
        fields = [_shown_field(name, field, _required(question)) for name, field in _fields(question).items()]
        parts.append("\n".join(fields)[:_MOST_FIELD_CHARS])
    parts.append(
        f"To answer, write here: {_how(question, question_id)} ; to decline: /decline {question_id}. On a "
        "command line: `nekro mcp answer` and `nekro mcp decline` with the same words."
    )
    return "\n".join(parts)


def answer_of(question: Question, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of an answer, as the question's schema describes it.

    The texts of a command line become numbers, booleans and lists where the schema wants them.

    Args:
        given: values by the names of the fields; ``""`` names the only field.

    Raises:
        InvalidValueError: a field is missing, unknown or does not fit; the message names it.
    """
    fields, required = _fields(question), _required(question)
    values = dict(given)
    if "" in values:
        if len(fields) != 1:
            raise InvalidValueError(f"name the fields: {', '.join(f'{name}=…' for name in fields)}")
        values[next(iter(fields))] = values.pop("")
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise InvalidValueError(f"there is no field {unknown[0]!r}; fields: {', '.join(fields) or 'none'}")
    if len(json.dumps(values, default=str)) > _MOST_ANSWER_CHARS:
        raise InvalidValueError(f"the answer has more than {_MOST_ANSWER_CHARS} characters")
    answer: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            answer[name] = _fitting(name, field, values[name])
        elif "default" in field:
            answer[name] = _fitting(name, field, field["default"])
        elif name in required:
            raise InvalidValueError(f"the field {name!r} is missing")
    return answer


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or "an unknown host"
    except ValueError:  # the server may send any text
        return "an unknown host"


def _fields(question: Question) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the fields by name; what is not an object is left out."""
    properties = (question.schema or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    found = {str(name): field for name, field in properties.items() if isinstance(field, Mapping)}
    return dict(list(found.items())[:_MOST_FIELDS])


def _required(question: Question) -> frozenset[str]:
    listed = (question.schema or {}).get("required")
    return frozenset(str(name) for name in listed) if isinstance(listed, list) else frozenset()


def _shown_field(name: str, field: Mapping[str, Any], required: frozenset[str]) -> str:
    notes = [str(field.get("type") or "string")]
    choices = _choices(field)
    if choices:
        notes.append(f"one of {', '.join(line(choice, 60) for choice in choices)}")
    if name not in required:
        notes.append("optional")
    if "default" in field:
        notes.append(f"default {line(field['default'], 60)}")
    words = line(field.get("description") or field.get("title") or "", 300)
    return f"- {line(name, 60)} ({'; '.join(notes)}){f': {words}' if words else ''}"


def _how(question: Question, question_id: str) -> str:
    fields = _fields(question)
    if question.url is not None or not fields:
        return f"/answer {question_id}"
    return f"/answer {question_id} {' '.join(f'{line(name, 60)}=…' for name in fields)}"


def _choices(field: Mapping[str, Any]) -> list[Any]:
    """Return the values that a field may have; none if it may have any."""
    items = field.get("items")
    field = items if field.get("type") == "array" and isinstance(items, Mapping) else field
    listed = field.get("enum")
    if not isinstance(listed, list):
        titled = field.get("oneOf") or field.get("anyOf")
        listed = titled if isinstance(titled, list) else []
        listed = [one.get("const") for one in listed if isinstance(one, Mapping)]
    return listed[:_MOST_CHOICES]


def _fitting(name: str, field: Mapping[str, Any], value: Any) -> Any:
    """Return a value in the type of a field.

    Raises:
        InvalidValueError: it has another one.
    """
    kind, choices = str(field.get("type") or "string"), _choices(field)
    if kind == "array":
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(parts, list):
            raise InvalidValueError(f"{name}: {value!r} is not a list")
        for part in parts:
            _require_choice(name, part, choices)
        return parts
    fitting = _scalar(kind, value)
    if fitting is None:
        raise InvalidValueError(f"{name}: {value!r} is not of type {kind}")
    _require_choice(name, fitting, choices)
    if isinstance(fitting, int | float):
        _require_range(name, fitting, field)
    return fitting


def _scalar(kind: str, value: Any) -> str | int | float | bool | None:
    """Return a value in a simple type; None if it has none."""
    if kind == "boolean":
        return value if isinstance(value, bool) else _BOOLEANS.get(str(value).strip().lower())
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if kind in ("integer", "number"):
        try:
            number = int(value) if kind == "integer" else float(value)
            return number if math.isfinite(number) else None
        except (ValueError, OverflowError):
            return None
    return str(value)


def _require_range(name: str, value: float, field: Mapping[str, Any]) -> None:
    least, most = field.get("minimum"), field.get("maximum")
    if isinstance(least, int | float) and value < least:
        raise InvalidValueError(f"{name}: {value} is less than {least}")
    if isinstance(most, int | float) and value > most:
        raise InvalidValueError(f"{name}: {value} is more than {most}")


def _require_choice(name: str, value: Any, choices: list[Any]) -> None:
    if choices and value not in choices:
        shown = ", ".join(line(choice, 60) for choice in choices)
        raise InvalidValueError(f"{name}: {value!r} is none of {shown}")


_KEY: Final = "answer:"

_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}")
#: Characters of a call's id in that of its question.
_CALL_CHARS: Final = 8


def question_id(call_id: str, question: object) -> str:
    """Return the id of a question, which is plain data: the same one if a call asks the same again."""
    digest = hashlib.sha256(
        f"{call_id}\0{json.dumps(question, sort_keys=True)}".encode("utf-8", "surrogatepass")
    )
    return f"{call_id[-_CALL_CHARS:]}-{digest.hexdigest()[:4]}"


def is_asked_by(question_id: str, call_id: str) -> bool:
    """Whether a question may be one of a call."""
    return call_id.endswith(question_id.partition("-")[0])


def answer_key(question_id: str) -> str:
    """Return the key of the signal that answers a question."""
    return f"{_KEY}{question_id}"


class ChatAnswers:
    """Answers of people in the chat of a question: ``/answer ID …``, ``/decline ID``.

    Only a message that an adapter or the API received from a person comes here. What the agent, a plugin, a
    tool or sandboxed code writes into a chat is no such message.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def answer(self, line: str, *, chat_key: str, issuer: str, user_id: str) -> str | None:
        """Carry out a line of a person; returns the answer, None if it is none of the commands.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        name, _, rest = line.strip().partition(" ")
        asked, _, words = rest.strip().partition(" ")
        if name not in ("/answer", "/decline") or not _ID.fullmatch(asked):
            return None
        given: dict[str, Any] = {"action": "decline"}
        if name == "/answer":
            given = {"action": "accept", "content": _content(words.strip())}
        try:
            await answer_question(self._database, asked, given, chat_key=chat_key)
        except (NotFoundError, ArgumentError) as exc:
            return f"Not done: {exc}"
        logger.bind(question=asked, chat_key=chat_key, issuer=issuer, user_id=user_id).info("mcp_answered")
        return f"Passed on: {asked}."


async def answer_question(
    database: Database, question_id: str, answer: dict[str, Any], *, chat_key: str | None = None
) -> str:
    """Answer an open question; returns the call that asks.

    Args:
        answer: ``{"action": "accept" or "decline", "content": {field: value}}``.
        chat_key: only a question of this chat; None: of any.

    Raises:
        NotFoundError: no call waits for an answer to this question.
    """
    # Imported here because a command line that answers nothing does without the database's library.
    from nekro.app.jobs import pack

    async with database.begin() as transaction:
        calls = await transaction.job_signals.waiting(answer_key(question_id), chat_key=chat_key, limit=1)
        if not calls:
            raise NotFoundError(f"no call waits for an answer to question {question_id}; it may be over")
        await transaction.job_signals.signal(calls[0], key=answer_key(question_id), data=pack((answer,), {}))
    return calls[0]


def content_of(words: list[str]) -> dict[str, str]:
    """Return the content of an answer from ``FIELD=VALUE`` words, or from the value of the only field."""
    if len(words) == 1 and "=" not in words[0]:
        return {"": words[0]}
    pairs = (word.partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def _content(text: str) -> dict[str, str]:
    """Return the content of an answer in a chat: the value of the only field, or ``FIELD=VALUE`` words."""
    if not text:
        return {}
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe of a sentence
        return {"": text}
    return content_of(words) if all("=" in word for word in words) else {"": text}
