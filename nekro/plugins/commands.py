"""The table of all commands of a process, which finds and runs them."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

from nekro.plugins.entry_registry import CommandNames, Named
from nekro_agent.commands.registration import CmdCtl, Command
from nekro_agent.commands.schemas import (
    CommandExecutionContext,
    CommandResponse,
    Parameter,
    parameters_of,
    parse,
)
from nekro_agent.core.logger import get_sub_logger, log_failure
from nekro_agent.errors import InvalidValueError
from nekro_agent.execution.current import Payer, paying
from nekro_agent.execution.greenlets import run_callable
from nekro_agent.plugin import NekroPlugin, using

__all__ = ["CommandTable", "LoadedCommand"]

_log = get_sub_logger("commands")


@dataclass(frozen=True, kw_only=True)
class LoadedCommand:
    """A command and the plugin that owns it."""

    plugin: NekroPlugin
    command: Command
    parameters: list[Parameter]

    @property
    def full_name(self) -> str:
        """``<plugin key>:<name>``, which is unique."""
        return f"{self.plugin.key}:{self.command.name}"


class CommandTable:
    """Commands by name, alias and full name; a name goes to the plugin that was loaded first."""

    def __init__(self, plugins: Iterable[NekroPlugin]) -> None:
        """Index the commands of plugins, in the order in which they were loaded."""
        self._entries = [
            LoadedCommand(plugin=plugin, command=command, parameters=parameters_of(command.func))
            for plugin in plugins
            for command in plugin.commands
        ]
        plugin_of = {entry.plugin.key: entry.plugin for entry in self._entries}
        self._names = CommandNames(
            [
                Named(
                    entry=entry,
                    plugin_key=entry.plugin.key,
                    name=entry.command.name,
                    aliases=tuple(entry.command.aliases),
                )
                for entry in self._entries
            ],
            is_enabled=lambda key: plugin_of[key].is_enabled,
        )

    def __iter__(self) -> Iterator[LoadedCommand]:
        """Iterate over the commands that are listed."""
        return (e for e in self._entries if e.plugin.is_enabled and not e.command.internal)

    def refresh(self, plugins: Iterable[NekroPlugin]) -> None:
        """List the commands of these plugins from now on."""
        vars(self).update(vars(CommandTable(plugins)))

    def find(self, name: str) -> LoadedCommand:
        """Return a command of an enabled plugin.

        Raises:
            InvalidValueError: there is none; the message suggests similar names.
        """
        return self._names.find(name)

    async def run(self, line: str, context: CommandExecutionContext) -> AsyncIterator[CommandResponse]:
        """Run ``/name arguments`` and yield the responses; the last one is final.

        Errors (unknown command, missing permission, invalid arguments, an exception of the plugin)
        are responses too.
        """
        name, _, rest = line.strip().partition(" ")
        try:
            entry = self.find(name)
            if not context.may(entry.command.permission):
                level = entry.command.permission.value
                raise InvalidValueError(f"command {entry.command.name} needs the permission {level}")
            arguments = parse(entry.parameters, rest)
        except InvalidValueError as exc:
            yield CmdCtl.failed(str(exc))
            return
        try:
            with using(entry.plugin):
                payer = _payer(entry.plugin.key, context)
                async for response in _paid(payer, _responses(entry, context, arguments)):
                    yield response
                    if response.is_final:
                        return
        except (Exception, SystemExit) as exc:  # plugin code; the user must get a response
            log = _log.bind(command=entry.full_name)
            log_failure(log, "command_failed", exc, plugin_key=entry.plugin.key)
            yield CmdCtl.failed(f"{type(exc).__name__}: {exc}".rstrip(": "))
            return
        yield CmdCtl.success()


def _payer(plugin_key: str, context: CommandExecutionContext) -> Payer:
    return Payer(
        plugin_key=plugin_key,
        chat_key=context.chat_key or None,
        user_id=context.user_id or None,
        adapter_key=context.adapter_key or None,
    )


async def _paid(payer: Payer, responses: AsyncIterator[CommandResponse]) -> AsyncIterator[CommandResponse]:
    """Let each step ask models on an account; between the steps the reader's account is in force."""
    while True:
        with paying(payer):
            try:
                response = await anext(responses)
            except StopAsyncIteration:
                return
        yield response


async def _responses(
    entry: LoadedCommand, context: CommandExecutionContext, arguments: dict[str, object]
) -> AsyncIterator[CommandResponse]:
    func = entry.command.func
    entry.plugin.refresh_config()
    if inspect.isasyncgenfunction(func):
        async for item in func(context, **arguments):
            yield _as_response(item, final=False)
        return
    result = await run_callable(func, context, **arguments)
    if isinstance(result, AsyncIterator):
        async for item in result:
            yield _as_response(item, final=False)
    else:
        yield _as_response(result, final=True)


def _as_response(item: object, *, final: bool) -> CommandResponse:
    if isinstance(item, CommandResponse):
        return item
    text = "" if item is None else str(item)
    return CmdCtl.success(text) if final else CmdCtl.message(text)
