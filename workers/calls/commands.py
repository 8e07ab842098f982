"""Plugin commands: a line is sent to a worker, which holds the plugins' state, and its responses return.

A command may ask a question (``CmdCtl.wait``). The question is stored per chat and user, so the
answer may arrive in another process; each question accepts one answer.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from nekro.app.calls.command_sender import COMMAND_OWNER
from nekro.base.redaction import Redactor
from nekro.wire.invocation import Invocation
from nekro.wire.values import Arguments, encode_value, pickled_for
from nekro_agent.commands.schemas import (
    CommandExecutionContext,
    CommandOutputSegmentType,
    CommandResponse,
    CommandResponseStatus,
)
from nekro_agent.commands.table import CommandTable
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import (
    DownloadError,
    InvalidValueError,
    ResultError,
    UploadQuotaError,
)
from nekro_agent.execution.invoke import Outcome
from nekro_agent.files import staging
from nekro_agent.files.file_system import FileSystem
from nekro_agent.methods import Lane
from workers.calls.handler import CallTarget, OnStep, TaskSubject

__all__ = ["CommandLines"]

_log = get_sub_logger("commands")


class CommandLines(CallTarget):
    """Runs command lines on a worker, each at most once because commands have effects."""

    subject = TaskSubject(name="command", plugin_key=COMMAND_OWNER, lane=Lane.METHODS)
    is_claimed = True

    def __init__(self, table: CommandTable, redactor: Redactor, *, return_bytes: int) -> None:
        self._table = table
        self._redactor = redactor
        self._return_bytes = return_bytes

    async def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Outcome:
        """Run a line; the value is every response as JSON data."""
        (line, fields), _ = arguments
        context = CommandExecutionContext.model_validate({**fields, "message_id": invocation.call_id})
        responses = []
        async with staging.call_scope():
            async for response in self._table.run(line, context):
                await self._store_files(response, line, invocation)
                responses.append(self._plain(response))
        return Outcome(type=self.subject.type, value=responses)

    async def _store_files(self, response: CommandResponse, line: str, invocation: Invocation) -> None:
        """Copy the response's files to the chat's uploads, where the processes that show it find them."""
        parts = [part for part in response.output_segments or () if part.file_path]
        if not parts:
            return
        entry = self._table.find(line.split()[0])
        files = FileSystem(invocation.chat_key, invocation.container_key, plugin_key=entry.plugin.key)
        for part in parts:
            try:
                path = await files.bring_to_uploads(str(part.file_path), part.file_name or "")
            except (InvalidValueError, DownloadError, UploadQuotaError, OSError) as exc:
                _log.bind(command=entry.full_name).opt(exception=exc).warning("command_file_not_stored")
                name = part.file_name or PurePosixPath(str(part.file_path)).name
                part.text = f"{part.text}\n[the {part.type.value} {name} could not be sent]".lstrip()
                part.type, part.file_path = CommandOutputSegmentType.TEXT, None
            else:
                part.file_path, part.file_name = path, part.file_name or PurePosixPath(path).name

    def _plain(self, response: CommandResponse) -> dict[str, Any]:
        plain = response.model_dump(exclude={"data"}, mode="json", fallback=str)
        if response.status is CommandResponseStatus.ERROR:
            plain["message"] = self._redactor(response.message)
        try:
            is_plain = pickled_for(encode_value(response.data, max_bytes=self._return_bytes).decode()) is None
        except ResultError:
            is_plain = False
        # The texts are the answer; data attached for programs must not make the answer fail.
        plain["data"] = response.data if is_plain else str(response.data)
        return plain
