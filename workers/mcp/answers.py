"""Answers of people to questions of servers, from outside of workers."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from nekro_agent.errors import NotFoundError

if TYPE_CHECKING:
    from storage.engine import Database

__all__ = ["answer_key", "answer_question", "content_of", "is_asked_by", "question_id"]

_KEY: Final = "answer:"
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


async def answer_question(database: Database, question_id: str, answer: dict[str, Any]) -> str:
    """Answer an open question; returns the call that asks.

    Args:
        answer: ``{"action": "accept" or "decline", "content": {field: value}}``.

    Raises:
        NotFoundError: no call waits for an answer to this question.
    """
    # Imported here because a command line that answers nothing does without the database's library.
    from workers.jobs.data import pack

    async with database.begin() as transaction:
        calls = await transaction.job_signals.waiting(answer_key(question_id), limit=1)
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
