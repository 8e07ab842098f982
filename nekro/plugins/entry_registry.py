"""The registry of sandbox methods and the names of commands; and a check of a call's arguments.

Before a call is sent, number and names of its arguments are compared with the method's parameters. Types are
not: a worker does not refuse a type either, because published plugins rely on that.
"""

from __future__ import annotations

import difflib
import inspect
import json
import keyword
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

from loguru import logger

from nekro.plugins.entries import MethodEntry, PluginEntry
from nekro_agent.core.logger import log_failure
from nekro_agent.errors import ArgumentError, InvalidValueError, MethodDisabledError, MethodNotFoundError
from nekro_agent.methods import BUILT_IN_METHODS, OWN_NAMES

if TYPE_CHECKING:
    from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = [
    "Collect",
    "CommandNames",
    "Named",
    "Registry",
    "refuse_unfit",
    "refuse_unfit_text",
]

#: Longest part of an unknown name that is compared with known names.
_MOST_COMPARED_CHARS: Final = 200
#: Selects methods of a plugin for a chat.
Collect: TypeAlias = "Callable[[PluginEntry, list[MethodEntry], AgentCtx], Awaitable[list[MethodEntry]]]"


class Registry:
    """Methods by full name, by bare name, and by registered label.

    Bare names are assigned in this order; a method without one stays callable by its full name:
    function names before labels; among equal function names the plugin that was loaded first
    (shipped plugins, then ``NEKRO_PLUGINS__DIRS`` in order, then entry points; by file name within
    a folder). A label is an alias only if it is an identifier and no function has that name.
    """

    def __init__(self, plugins: Iterable[PluginEntry] = (), *, collect: Collect | None = None) -> None:
        """Index the plugins' methods.

        Args:
            plugins: in the order in which they were loaded.
            collect: returns those of a plugin's methods that its ``mount_collect_methods`` selects for a
                chat; None means all. If it fails, the plugin keeps all methods.
        """
        self._collect = collect
        self.replace(plugins)

    def replace(self, plugins: Iterable[PluginEntry]) -> None:
        """Serve these plugins from now on."""
        self.plugins = list(plugins)
        #: Names that two methods have, or the code itself; ``nekro plugins`` shows them.
        self.warnings: list[str] = []
        self._plugins = {plugin.key: plugin for plugin in self.plugins}
        self._by_task: dict[str, MethodEntry] = {}
        self._by_name: dict[str, MethodEntry] = {}
        # Disabled plugins come last, so that they do not take a bare name from an enabled method.
        for plugin in sorted(self.plugins, key=lambda plugin: not plugin.enabled):
            for entry in plugin.methods:
                self._by_task[entry.task] = entry
                self._claim(entry.name, entry)
        for entry in self._by_task.values():
            self._claim_label(entry)
        self._bare_names: dict[str, list[str]] = {}
        for name, owner in self._by_name.items():
            if name in OWN_NAMES or name in BUILT_IN_METHODS:
                self.warnings.append(
                    f"{owner.task} is callable by this full name only: code has its own {name}"
                )
            else:
                self._bare_names.setdefault(owner.task, []).append(name)

    def __iter__(self) -> Iterator[MethodEntry]:
        return iter(self._by_task.values())

    def __len__(self) -> int:
        return len(self._by_task)

    def __contains__(self, name: object) -> bool:
        return name in self._by_task or name in self._by_name

    def find(self, name: str) -> MethodEntry:
        """Return the method of a full name, function name or alias.

        Raises:
            MethodNotFoundError: there is none; the message suggests similar names.
            MethodDisabledError: its plugin is disabled.
        """
        entry = self._by_task.get(name) or self._by_name.get(name)
        if entry is None:
            known = [*self._by_name, *self._by_task]
            # A comparison takes time and memory for each character, and callers choose the name.
            near = difflib.get_close_matches(name[:_MOST_COMPARED_CHARS], known, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "`nekro methods` lists every method"
            raise MethodNotFoundError(f"no plugin has a method {name!r}; {hint}")
        if not self.is_enabled(entry.plugin_key):
            raise MethodDisabledError(
                f"method {entry.task} exists, but plugin {entry.plugin_key} is disabled; "
                f"`nekro plugins enable {entry.plugin_key}` enables it, unless NEKRO_PLUGINS__DISABLED has it"
            )
        return entry

    def is_enabled(self, plugin_key: str) -> bool:
        """Whether a plugin's methods may be called."""
        plugin = self._plugins.get(plugin_key)
        return plugin is not None and plugin.enabled

    def bare_names(self, entry: MethodEntry) -> list[str]:
        """Return the short names of ``entry`` in code: its function name, its alias, both or none."""
        return self._bare_names.get(entry.task, [])

    def enabled(self) -> list[MethodEntry]:
        """Return every method that may be called."""
        return [entry for entry in self if self.is_enabled(entry.plugin_key)]

    async def available(self, ctx: AgentCtx, *, plugin_key: str | None = None) -> list[MethodEntry]:
        """Return the methods of a chat's code: enabled, and selected by ``mount_collect_methods``.

        Args:
            plugin_key: only those of one plugin; None means all.
        """
        enabled: dict[str, list[MethodEntry]] = {}
        for entry in self.enabled():
            enabled.setdefault(entry.plugin_key, []).append(entry)
        entries: list[MethodEntry] = []
        for plugin in self.plugins:
            if plugin_key is not None and plugin.key != plugin_key:
                continue
            own = enabled.get(plugin.key, [])
            if own and "collect_methods" in plugin.hooks:
                own = await self._collected(plugin, own, ctx)
            entries += own
        return entries

    async def _collected(
        self, plugin: PluginEntry, own: list[MethodEntry], ctx: AgentCtx
    ) -> list[MethodEntry]:
        if self._collect is None:
            return own
        try:
            return await self._collect(plugin, own, ctx)
        except Exception as exc:  # plugin code; the other plugins' methods must stay available
            log = logger.bind(plugin=plugin.key)
            log_failure(log, "collect_methods_failed", exc, plugin_key=plugin.key)
            return own

    def _claim(self, name: str, entry: MethodEntry) -> None:
        winner = self._by_name.setdefault(name, entry)
        if winner is not entry:
            self.warnings.append(
                f"method {name} exists in {winner.plugin_key} and {entry.plugin_key}: the bare name calls "
                f"{winner.task}, the other is callable as {entry.task}"
            )

    def _claim_label(self, entry: MethodEntry) -> None:
        label = entry.label
        if label == entry.name or not label.isidentifier() or keyword.iskeyword(label):
            return
        owner = self._by_name.setdefault(label, entry)
        if owner is not entry:
            logger.bind(label=label, task=entry.task, owner=owner.task).debug("label_is_no_alias")


#: Kinds of parameters that take any number of arguments, and no default.
_VARIADIC: Final = ("VAR_POSITIONAL", "VAR_KEYWORD")
#: Longer texts are left to the worker, which parses them in slices.
_MOST_CHARS: Final = 4096


def refuse_unfit(entry: MethodEntry, count: int, names: Collection[str]) -> None:
    """Return if a call with so many positional and these named arguments fits the method.

    Raises:
        ArgumentError: it does not; the text is that of a worker.
    """
    if entry.parameters is not None:
        # Names that the method does not have are the caller's: any number, of any length.
        has_all = _signature(entry).parameters.keys() >= set(names)
        check = _misfit if has_all else _misfit.__wrapped__
        error = check(entry, count, tuple(names))
        if error is not None:
            raise ArgumentError(f"{entry.name}{entry.signature}: {error}")


def refuse_unfit_text(entry: MethodEntry, text: str) -> None:
    """Return if arguments in tagged text fit the method, or the worker has to decide.

    Args:
        text: hostile; only numbers and names are read of it, and only of a short one.

    Raises:
        ArgumentError: they do not fit.
    """
    if len(text) > _MOST_CHARS or entry.parameters is None:
        return
    try:
        args, kwargs = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return  # the worker's parser reports what is malformed
    if isinstance(args, list) and isinstance(kwargs, dict) and not any(name[:1] == "$" for name in kwargs):
        refuse_unfit(entry, len(args), kwargs)


@lru_cache(maxsize=4096)
def _misfit(entry: MethodEntry, count: int, names: tuple[str, ...]) -> str | None:
    given = dict.fromkeys(names)
    if entry.swapped is not None and entry.swapped[0] in given:
        # As in ``nekro.plugins.invoke``: the first parameter receives the context.
        given[entry.swapped[1]] = given.pop(entry.swapped[0])
    try:
        # One more: the context.
        _signature(entry).bind(*[None] * (count + 1), **given)
    except TypeError as exc:
        return str(exc)
    return None


@lru_cache(maxsize=4096)
def _signature(entry: MethodEntry) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                one.name,
                inspect._ParameterKind[one.kind],
                default=inspect.Parameter.empty if one.is_required or one.kind in _VARIADIC else None,
            )
            for one in entry.parameters or ()
        ]
    )


E = TypeVar("E")


@dataclass(frozen=True, kw_only=True)
class Named(Generic[E]):
    """A command with its names."""

    entry: E
    plugin_key: str
    name: str
    aliases: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """``<plugin key>:<name>``, which is unique."""
        return f"{self.plugin_key}:{self.name}"


class CommandNames(Generic[E]):
    """Commands by name; a name goes to the plugin that was loaded first."""

    def __init__(self, commands: Iterable[Named[E]], *, is_enabled: Callable[[str], bool]) -> None:
        """Index commands.

        Args:
            is_enabled: whether the plugin of a key is enabled; asked at each search.
        """
        self._by_name: dict[str, Named[E]] = {}
        self._is_enabled = is_enabled
        #: Names that two commands have; ``nekro plugins`` shows them.
        self.warnings: list[str] = []
        for command in commands:
            for name in (command.full_name, command.name, *command.aliases):
                self._claim(name, command)

    def find(self, name: str) -> E:
        """Return a command of an enabled plugin; ``name`` may begin with a slash.

        Raises:
            InvalidValueError: there is none; the message suggests similar names.
        """
        found = self._by_name.get(name.removeprefix("/"))
        if found is None or not self._is_enabled(found.plugin_key):
            known = [name for name, one in self._by_name.items() if self._is_enabled(one.plugin_key)]
            near = difflib.get_close_matches(name.removeprefix("/"), known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise InvalidValueError(f"there is no command {name!r}{hint}")
        return found.entry

    def _claim(self, name: str, command: Named[E]) -> None:
        owner = self._by_name.setdefault(name, command)
        if owner is not command:
            self.warnings.append(
                f"command {name} of {command.plugin_key} is shadowed by {owner.plugin_key}'s; "
                f"call it as {command.full_name}"
            )
