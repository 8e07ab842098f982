"""Answers of people to questions of servers, from outside of workers."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from typing import TYPE_CHECKING, Any, Final

from loguru import logger

from nekro_agent.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from storage.engine import Database

__all__ = ["ChatAnswers", "answer_key", "answer_question", "content_of", "is_asked_by", "question_id"]

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
