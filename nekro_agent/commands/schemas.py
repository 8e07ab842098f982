"""Input and output types of commands."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field

from nekro_agent.schemas.i18n import SupportedLang

__all__ = [
    "CommandExecutionContext",
    "CommandOutputSegment",
    "CommandOutputSegmentType",
    "CommandPermission",
    "CommandResponse",
    "CommandResponseStatus",
]


class CommandPermission(StrEnum):
    """Least permission that a command requires; users of the later levels may run it too."""

    PUBLIC = "public"
    USER = "user"
    ADVANCED = "advanced"
    SUPER_USER = "super_user"


class CommandResponseStatus(StrEnum):
    """State of a command after a response."""

    #: More responses follow.
    PROCESSING = "processing"
    #: The next input goes to ``callback_cmd``.
    WAITING = "waiting"
    SUCCESS = "success"
    ERROR = "error"


class CommandOutputSegmentType(StrEnum):
    """Kind of one part of a response."""

    TEXT = "text"
    IMAGE = "image"
    FILE = "file"


class CommandOutputSegment(BaseModel):
    """One part of a response."""

    type: CommandOutputSegmentType = CommandOutputSegmentType.TEXT
    text: str = ""
    file_path: str | None = None
    file_name: str | None = None
    mime_type: str | None = None
    web_url: str | None = None


class CommandResponse(BaseModel):
    """A response of a command."""

    status: CommandResponseStatus
    message: str = ""
    data: Any = None
    output_segments: list[CommandOutputSegment] | None = None
    callback_cmd: str | None = None
    wait_options: list[str] | None = None
    #: Seconds.
    wait_timeout: float | None = None
    on_timeout_message: str = ""
    context_data: dict[str, Any] | None = None

    @property
    def is_final(self) -> bool:
        """Whether this is the command's last response."""
        return self.status is not CommandResponseStatus.PROCESSING


class CommandExecutionContext(BaseModel):
    """The user and chat for which a command runs."""

    user_id: str = ""
    chat_key: str = ""
    username: str = ""
    adapter_key: str = ""
    is_super_user: bool = False
    is_advanced_user: bool = False
    lang: SupportedLang = SupportedLang.ZH_CN
    #: Id of the call; a line that is sent again under the id of an earlier call has the same.
    message_id: str = ""
    #: The value of ``CmdCtl.wait(context_data=…)``.
    context_data: dict[str, Any] = Field(default_factory=dict)

    def may(self, permission: CommandPermission) -> bool:
        """Whether the user may run commands of that level."""
        if permission is CommandPermission.PUBLIC or self.is_super_user:
            return True
        if permission is CommandPermission.USER:
            return self.is_advanced_user or bool(self.user_id)
        return permission is CommandPermission.ADVANCED and self.is_advanced_user
