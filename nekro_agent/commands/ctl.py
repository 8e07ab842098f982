"""Builds the responses of a command's function."""

from __future__ import annotations

from typing import Any, TypeAlias

from nekro_agent.commands.schemas import (
    CommandOutputSegment,
    CommandOutputSegmentType,
    CommandResponse,
    CommandResponseStatus,
)
from nekro_agent.schemas.i18n import I18nDict, resolve_i18n

__all__ = ["CmdCtl"]

#: A text, a text in several languages, or parts.
Content: TypeAlias = str | I18nDict | list[CommandOutputSegment]


class CmdCtl:
    """Builds responses: ``return CmdCtl.success("done")``, or ``yield`` several."""

    @staticmethod
    def message(content: Content = "", *, data: Any = None) -> CommandResponse:
        """Send an intermediate message; the command continues."""
        return _response(CommandResponseStatus.PROCESSING, content, data)

    @staticmethod
    def success(content: Content = "", *, data: Any = None) -> CommandResponse:
        """End the command as successful."""
        return _response(CommandResponseStatus.SUCCESS, content, data)

    @staticmethod
    def failed(content: Content = "", *, data: Any = None) -> CommandResponse:
        """End the command as failed."""
        return _response(CommandResponseStatus.ERROR, content, data)

    @staticmethod
    def wait(
        message: str,
        callback_cmd: str,
        options: list[str] | None = None,
        timeout: float = 60.0,
        on_timeout_message: str = "",
        context_data: dict[str, Any] | None = None,
    ) -> CommandResponse:
        """Request more input, which is passed to the command ``callback_cmd``.

        Args:
            timeout: seconds to wait for the input.
        """
        return CommandResponse(
            status=CommandResponseStatus.WAITING,
            message=message,
            callback_cmd=callback_cmd,
            wait_options=options,
            wait_timeout=timeout,
            on_timeout_message=on_timeout_message,
            context_data=context_data,
        )


def _response(status: CommandResponseStatus, content: Content, data: Any) -> CommandResponse:
    segments: list[CommandOutputSegment] | None = None
    if isinstance(content, list):
        segments, text = list(content), ""
        if segments and segments[0].type is CommandOutputSegmentType.TEXT:
            text = segments.pop(0).text
    else:
        text = resolve_i18n(content)
    return CommandResponse(status=status, message=text, data=data, output_segments=segments or None)
