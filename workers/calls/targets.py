"""What calls run on a worker: sandbox methods, command lines of plugins, and code of other processes.

Code has effects, so its run is claimed by its id like a call: a second delivery never runs the code again.
Its output is published as live events of the chat that name the run as their call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Final

from nekro.app.calls.fleet_calls import COMMAND_OWNER
from nekro.app.chats.events import LiveText, live_event
from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import chat_of, context_of
from nekro.app.rounds.runs import CodeRuns
from nekro.base.redaction import Redactor
from nekro.plugins.commands import CommandTable
from nekro.plugins.invoke import Outcome, call_method
from nekro.plugins.registry import LoadedMethod, LoadedRegistry
from nekro.wire.author_frames import AuthorFrame
from nekro.wire.invocation import Invocation
from nekro.wire.values import Arguments, encode_value, pickled_for
from nekro_agent.commands.schemas import (
    CommandExecutionContext,
    CommandOutputSegmentType,
    CommandResponse,
    CommandResponseStatus,
)
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import (
    DownloadError,
    InvalidValueError,
    ResultError,
    UploadQuotaError,
)
from nekro_agent.execution.current import CurrentCall, Payer, paying, serving
from nekro_agent.files import staging
from nekro_agent.files.file_system import FileSystem
from nekro_agent.methods import Lane
from nekro_agent.plugin import using
from nekro_client.event_types import EventType
from workers.calls.claims import TaskSubject
from workers.calls.handler import CallTarget, OnStep, explained, places_in_plugin
from workers.calls.progress import CallReports
from workers.plugins.loop_watchdog import LoopWatchdog

__all__ = [
    "CodeTarget",
    "CommandLines",
    "MethodTargets",
]


class MethodTargets:
    """Finds the methods that calls name; one instance per worker process."""

    def __init__(
        self,
        *,
        registry: LoadedRegistry,
        reports: CallReports,
        home_of: Callable[[str], str | None],
        watchdog: LoopWatchdog | None = None,
    ) -> None:
        """Create the targets.

        Args:
            home_of: the queue of a plugin that another process owns; None if this process may run it.
        """
        self.registry = registry
        self.reports = reports
        self.home_of = home_of
        self.watchdog = watchdog

    def find(self, invocation: Invocation) -> CallTarget:
        """Return the method that a call names.

        Raises:
            MethodNotFoundError, MethodDisabledError: as their names say.
        """
        return _Method(self.registry.loaded(self.registry.find(invocation.method)), self)


class _Method(CallTarget):
    """One method, and the services of the process that runs it."""

    def __init__(self, loaded: LoadedMethod, targets: MethodTargets) -> None:
        self._loaded, self._targets = loaded, targets
        self.subject = loaded.entry
        self.is_claimed = loaded.entry.is_claimed

    def home(self, arguments: Arguments) -> str | None:
        return self._targets.home_of(self.subject.plugin_key)

    async def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Outcome:
        # The plugin may have been reloaded since the call was found.
        loaded, watchdog = self._targets.registry.newest(self._loaded), self._targets.watchdog
        entry = loaded.entry
        loaded.plugin.refresh_config()
        with (
            using(loaded.plugin),
            serving(_ids(invocation)),
            paying(_payer(invocation, entry.plugin_key)),
            self._targets.reports.following(entry, invocation) as on_progress,
        ):
            ctx = context_of(
                invocation,
                user_id=invocation.user_id,
                plugin_key=entry.plugin_key,
                call_id=invocation.call_id,
                round_id=invocation.round_id,
                on_progress=on_progress,
            )
            work = call_method(loaded.method, ctx, *arguments)
            if watchdog is None:
                return await work
            return await watchdog.follow(
                entry, work, remaining_seconds=invocation.remaining_seconds(), on_step=on_step
            )

    def explained(self, error: Exception, arguments: Arguments) -> Exception:
        return explained(error, self._loaded.method.func, *arguments)

    def places(self, error: Exception, redactor: Redactor) -> tuple[AuthorFrame, ...]:
        return places_in_plugin(error, self._loaded.method.func, redactor)


def _payer(invocation: Invocation, plugin_key: str) -> Payer:
    return Payer(
        plugin_key=plugin_key,
        chat_key=invocation.chat_key,
        user_id=invocation.user_id,
        adapter_key=invocation.adapter_key,
        turn_id=invocation.turn_id,
        account_id=invocation.account_id,
    )


def _ids(invocation: Invocation) -> CurrentCall:
    return CurrentCall(
        call_id=invocation.call_id,
        chat_key=invocation.chat_key,
        round_id=invocation.round_id,
        turn_id=invocation.turn_id,
    )


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
        name, plugin_key = line.split()[0], None
        with contextlib.suppress(InvalidValueError):  # the table answers that there is none
            plugin_key = self._table.find(name.removeprefix("/")).plugin.key
        async with staging.call_scope(
            name,
            chat_key=invocation.chat_key,
            container_key=invocation.container_key,
            plugin_key=plugin_key,
        ):
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


#: Time of a run that is reserved for the end of its sandbox and for the report: code that reaches the
#: deadline is stopped before, so that its caller gets its output.
_REPORT_SECONDS: Final = 2.0


class CodeTarget(CallTarget):
    """Runs code on a rounds worker."""

    subject = TaskSubject(name="run", plugin_key="nekro", lane=Lane.ROUNDS)
    is_claimed = True

    def __init__(self, runs: CodeRuns, publisher: EventPublisher, *, wall_seconds: float) -> None:
        """Create the target.

        Args:
            wall_seconds: time limit of a run; the deadline of its call may be earlier.
        """
        self._runs = runs
        self._publisher = publisher
        self._wall_seconds = wall_seconds

    async def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Outcome:
        """Run the code; the value is its ``CodeReport`` as JSON data."""
        (code,), _ = arguments
        left = invocation.remaining_seconds()
        output = LiveText(partial(self._publish, invocation))
        try:
            report = await self._runs.run(
                code,
                chat=chat_of(invocation),
                user_id=invocation.user_id,
                wakes_agent=invocation.wakes_agent,
                run_id=invocation.call_id,
                wall_seconds=min(self._wall_seconds, max(left - _REPORT_SECONDS, left / 2)),
                on_output=output.add,
            )
        finally:
            output.flush()
        return Outcome(type=self.subject.type, value=report.to_plain())

    def _publish(self, invocation: Invocation, data: dict[str, Any]) -> None:
        event = live_event(EventType.OUTPUT_CHUNK, data, call_id=invocation.call_id)
        self._publisher.live(invocation.chat_key, event)
