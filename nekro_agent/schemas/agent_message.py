"""The segments of messages that plugins pass to ``message_service``."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

__all__ = ["AgentMessageSegment", "AgentMessageSegmentType", "convert_agent_message_to_prompt"]


class AgentMessageSegmentType(StrEnum):
    """Kind of a segment."""

    TEXT = "text"
    IMAGE = "image"
    FILE = "file"


class AgentMessageSegment(BaseModel):
    """A text, or the path of a file."""

    model_config = ConfigDict(use_enum_values=True)

    type: AgentMessageSegmentType = AgentMessageSegmentType.TEXT
    content: str

    def get_prompt(self) -> str:
        """Return the segment as the history shows it."""
        if self.type == AgentMessageSegmentType.TEXT:
            return self.content
        return f"[{self.type.capitalize()}: {self.content}]"


def convert_agent_message_to_prompt(agent_messages: list[AgentMessageSegment]) -> str:
    """Return segments as one text."""
    return " ".join(segment.get_prompt() for segment in agent_messages)
