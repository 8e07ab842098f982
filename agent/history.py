"""Renders the chat's messages for a prompt, within limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from agent.model import HistoryMessage, Part, TextPart
from agent.text import attribute, cut_middle, neutralise
from broker_config.settings import AgentSettings
from nekro_agent.ports import MessageKind

__all__ = ["Segment", "render_history", "render_images", "render_time", "split_by_round"]

#: Least characters shown of a message that must be shown although the budget is used up.
_LEAST_CHARS = 100


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive messages, oldest first, that one prompt message shows."""

    messages: tuple[HistoryMessage, ...]


def split_by_round(messages: Sequence[HistoryMessage], asked_at: Sequence[datetime]) -> list[Segment]:
    """Split the history at the times when earlier rounds of the turn read it.

    Returns:
        one segment more than ``asked_at`` has entries: what the first round saw, then what came
        between each round and the next. Every message is in exactly one segment, so each is shown
        once, even if the clocks of the hosts that wrote them differ.
    """
    segments: list[list[HistoryMessage]] = [[] for _ in range(len(asked_at) + 1)]
    for message in messages:
        segments[sum(message.sent_at > moment for moment in asked_at)].append(message)
    return [Segment(messages=tuple(segment)) for segment in segments]


def render_history(segment: Segment, settings: AgentSettings) -> str:
    """Render the newest messages that fit, oldest first, with a line that counts the others.

    The newest message is always shown. A message that is too long is cut in the middle, so that it
    neither displaces the other messages nor disappears itself.
    """
    shown: list[str] = []
    room = settings.history_chars
    most_chars = room // 5
    for message in reversed(segment.messages[-settings.history_messages :]):
        text = _render(message, min(most_chars, max(room, _LEAST_CHARS)))
        if shown and len(text) > room:
            break
        shown.append(text)
        room -= len(text)
    hidden = len(segment.messages) - len(shown)
    if hidden:
        shown.append(f"[{hidden} older messages are not shown]")
    return "\n".join(reversed(shown))


def render_images(segment: Segment) -> list[Part]:
    """Return the pictures of a segment's messages, each after a text that names it."""
    parts: list[Part] = []
    for message in segment.messages:
        for image in message.images:
            if image.part is not None:
                parts += [TextPart(text=f"[image: {attribute(image.path, limit=200)}]"), image.part]
    return parts


def render_time(moment: datetime) -> str:
    """Return a time in the form that prompts use: UTC, to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _render(message: HistoryMessage, limit: int) -> str:
    body = cut_middle(neutralise(message.text), limit)
    body += "".join(f"\n[file: {attribute(name, limit=200)}]" for name in message.attachments)
    body += "".join(f"\n[image: {attribute(image.path, limit=200)}]" for image in message.images)
    moment = render_time(message.sent_at)
    if message.kind is MessageKind.SYSTEM:
        return f'<notice at="{moment}">\n{body}\n</notice>'
    # The role is an attribute of its own, because a user may be called "you" or "assistant".
    if message.kind is MessageKind.ASSISTANT:
        return f'<message role="assistant" at="{moment}">\n{body}\n</message>'
    return f'<message role="user" from="{_sender(message)}" at="{moment}">\n{body}\n</message>'


def _sender(message: HistoryMessage) -> str:
    name = attribute(message.sender_name) or "unknown"
    return f"{name} ({attribute(message.sender_id)})" if message.sender_id else name
