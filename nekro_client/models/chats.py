"""Chats, their summaries and resets."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from nekro_client.models.base import Answer, Body
from nekro_client.models.messages import MessageSnippet

__all__ = [
    "ChatBody",
    "ChatSummary",
    "GivenTitle",
    "Reset",
    "StoppedRound",
    "Summary",
]


class Summary(Answer):
    """A summary of the messages of a chat up to one of them."""

    chat_key: str
    #: Grows by 1 within a chat; the first one after a reset is 1.
    version: int
    #: Sequence of the newest message that it covers.
    up_to: int
    #: When the oldest and the newest of them were written.
    oldest_at: datetime
    newest_at: datetime
    text: str
    #: The model group that was asked, and the model that answered.
    group: str
    model: str
    #: Of this version alone; None if the endpoint did not report them.
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    tokens_estimated: bool = False
    cost: float = 0
    created_at: datetime


class ChatSummary(Answer):
    """A chat in a list."""

    chat_key: str
    #: The adapter of the chat's platform; None for a chat without one.
    adapter: str | None = None
    #: How people know it: the title that was given to it, else the platform's name, else the first words of
    #: its oldest message of a person; None without all of them.
    title: str | None = None
    #: The platform's name of it.
    name: str | None = None
    #: ``group`` or ``private``; None if it is not known.
    type: str | None = None
    created_at: datetime
    #: When something last happened in it.
    active_at: datetime
    #: Number of its newest event, for `?after=` of its stream; 0 without one.
    last_event: int
    #: The newest one that people see; None without one.
    last_message: MessageSnippet | None = None
    #: Rounds that wait or run.
    open_rounds: int = 0
    #: Turns that have failed since `failures_since`; None without it.
    failures: int | None = None


class StoppedRound(Answer):
    """A round that was stopped."""

    id: str
    number: int
    state: str
    worker: str | None = None


class Reset(Answer):
    """The rounds that a reset of a chat stopped."""

    cancelled: list[StoppedRound] = []
    stopped: list[StoppedRound] = []
    #: They stop as soon as their workers read the request.
    still_running: list[StoppedRound] = []
    #: Calls that waited for approval, or in which programs waited; they are withdrawn.
    waits: list[str] = []


class ChatBody(Body):
    """A change of a chat."""

    #: Shown on one line, without invisible characters; None or an empty text takes the given title away.
    title: str | None = Field(max_length=200)


class GivenTitle(Answer):
    """The title that was given to a chat."""

    chat_key: str
    #: As it is stored; None: the chat has the platform's name or its first words.
    title: str | None = None
