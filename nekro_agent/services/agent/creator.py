"""Builds multimodal messages for an LLM."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from nekro_agent.errors import InvalidValueError
from nekro_agent.files import staging
from nekro_agent.files.names import HEAD_BYTES, content_type

__all__ = ["ContentSegment", "OpenAIChatMessage"]

Segment: TypeAlias = dict[str, Any]
Role: TypeAlias = Literal["user", "assistant", "system"]


class ContentSegment(BaseModel):
    """One content part, in the form of the OpenAI API; the constructors return plain dictionaries."""

    model_config = ConfigDict(extra="allow")

    type: str

    @staticmethod
    def text_content(text: str) -> Segment:
        """Return a text part."""
        return {"type": "text", "text": text}

    @staticmethod
    def image_content(image_url: str) -> Segment:
        """Return an image part; an ``http(s)://`` or ``data:`` URL."""
        return {"type": "image_url", "image_url": {"url": image_url}}

    @staticmethod
    def image_content_from_bytes(image_bytes: bytes, image_type: str = "png") -> Segment:
        """Return an image part that contains the image; type ``png`` or ``image/png``."""
        media_type = image_type if "/" in image_type else f"image/{image_type.lstrip('.').lower()}"
        media_type = "image/jpeg" if media_type == "image/jpg" else media_type
        encoded = base64.b64encode(image_bytes).decode()
        return ContentSegment.image_content(f"data:{media_type};base64,{encoded}")

    @staticmethod
    def image_content_from_path(image_path: str | Path) -> Segment:
        """Return an image part that contains a host file; a ``data:`` URL is used unchanged.

        Args:
            image_path: in a call, a text may name only a sandbox path or a file of this chat, plugin
                or call, because it may come from a model; a ``Path`` may name any file.

        Raises:
            InvalidValueError: the content is not that of an image, or the text names another file.
            OSError: the file cannot be read.
        """
        if isinstance(image_path, str) and image_path.startswith("data:"):
            return ContentSegment.image_content(image_path)
        path = Path(image_path)
        with staging.opened(image_path) as file:
            content = file.read()
        media_type = content_type(path.name, content[:HEAD_BYTES])
        if not media_type.startswith("image/"):
            raise InvalidValueError(
                f"{path.name!r} does not look like an image: its first bytes are not those of one"
            )
        return ContentSegment.image_content_from_bytes(content, media_type)


class OpenAIChatMessage(BaseModel):
    """One message: a role and content parts."""

    role: Role
    content: list[Segment] = Field(default_factory=list)

    def __init__(self, role: Role, content: Iterable[Segment | ContentSegment] = (), **values: Any) -> None:
        """Create a message; ``role`` and ``content`` are positional as in the reference."""
        super().__init__(role=role, content=[_plain(part) for part in content], **values)

    @classmethod
    def from_text(cls, role: Role, text: str) -> OpenAIChatMessage:
        """Return a message with one text part."""
        return cls(role, [ContentSegment.text_content(text)])

    @classmethod
    def create_empty(cls, role: Role) -> OpenAIChatMessage:
        """Return a message without content."""
        return cls(role)

    def add(self, segment: Segment | ContentSegment) -> OpenAIChatMessage:
        """Append a part."""
        self.content.append(_plain(segment))
        return self

    def batch_add(self, segments: Iterable[Segment | ContentSegment]) -> OpenAIChatMessage:
        """Append parts."""
        self.content.extend(_plain(segment) for segment in segments)
        return self

    def extend(self, message: OpenAIChatMessage) -> OpenAIChatMessage:
        """Append the parts of another message of the same role.

        Raises:
            InvalidValueError: the roles differ.
        """
        if not isinstance(message, OpenAIChatMessage):
            raise InvalidValueError(f"extend needs an OpenAIChatMessage, not {type(message).__name__}")
        if message.role != self.role:
            raise InvalidValueError(f"cannot append a {message.role} message to a {self.role} message")
        return self.batch_add(message.content)

    def tidy(self) -> OpenAIChatMessage:
        """Join consecutive texts without a separator, and drop empty ones."""
        tidied: list[Segment] = []
        for part in self.content:
            if part.get("type") == "text" and tidied and tidied[-1].get("type") == "text":
                tidied[-1] = ContentSegment.text_content(tidied[-1]["text"] + part["text"])
            elif part.get("type") != "text" or part.get("text"):
                tidied.append(part)
        self.content = tidied
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the message in the API's form; if all parts are texts, they become one string."""
        if self.content and all(part.get("type") == "text" for part in self.content):
            return {"role": self.role, "content": "".join(part["text"] for part in self.content)}
        return {"role": self.role, "content": list(self.content)}


def _plain(segment: Segment | ContentSegment) -> Segment:
    return segment.model_dump() if isinstance(segment, ContentSegment) else dict(segment)
