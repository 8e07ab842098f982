"""The catalogue of sandbox methods: every method of every loaded plugin, by name."""

from __future__ import annotations

import difflib
import fnmatch
import keyword
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError, MethodDisabledError, MethodNotFoundError
from nekro_agent.execution.invoke import run_callable
from nekro_agent.execution.signatures import describe
from nekro_agent.methods import OWN_NAMES, Lane, SandboxMethod, SandboxMethodType
from nekro_agent.mounts import LANE_ATTRIBUTE, REPEATABLE_ATTRIBUTE
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["MethodEntry", "Registry"]

_log = get_sub_logger("registry")


@dataclass(frozen=True, kw_only=True)
class MethodEntry:
    """One method as the catalogue lists it."""

    #: The Python function's name, by which sandboxed code calls it.
    name: str
    #: ``author.module.function``: Celery task name and unambiguous name.
    task: str
    plugin: NekroPlugin
    method: SandboxMethod
    #: Parameters and result without the context: ``(city: str) -> str``.
    signature: str
    #: Docstring, the LLM's only description; None means that the prompt does not list the method.
    doc: str | None
    lane: Lane

    @property
    def plugin_key(self) -> str:
        """Key of the plugin that owns it."""
        return self.plugin.key

    @property
    def type(self) -> SandboxMethodType:
        """Determines what happens to the result."""
        return self.method.method_type

    @property
    def repeatable(self) -> bool:
        """Whether a call may run again after its worker died during it."""
        return bool(getattr(self.method.func, REPEATABLE_ATTRIBUTE, False))

    @property
    def enabled(self) -> bool:
        """Whether it may be called."""
        return self.plugin.is_enabled


class Registry:
    """Methods by full name, by bare name, and by registered label.

    Bare names are assigned in this order; a method without one stays callable by its full name:
    function names before labels; among equal function names the plugin that was loaded first
    (shipped plugins, then ``NEKRO_PLUGINS__DIRS`` in order, then entry points; by file name within
    a folder). A label is an alias only if it is an identifier and no function has that name.
    """

    def __init__(self, plugins: Iterable[NekroPlugin], *, long_methods: Sequence[str] = ()) -> None:
        """Index the plugins' methods.

        Args:
            plugins: in the order in which they were loaded.
            long_methods: patterns of full names (``author.module.*``) that run in lane ``long``.
        """
        self.plugins = list(plugins)
        self._long_methods = long_methods
        self.warnings: list[str] = []
        self._by_task: dict[str, MethodEntry] = {}
        self._by_name: dict[str, MethodEntry] = {}
        # Disabled plugins come last, so that they do not take a bare name from an enabled method.
        for plugin in sorted(self.plugins, key=lambda plugin: not plugin.is_enabled):
            for method in plugin.sandbox_methods:
                entry = _entry(plugin, method, long_methods)
                self._by_task[entry.task] = entry
                self._claim(entry.name, entry)
        for entry in list(self._by_task.values()):
            self._claim_label(entry)
        self._bare_names: dict[str, list[str]] = {}
        for name, owner in self._by_name.items():
            if name in OWN_NAMES:
                self._warn(f"{owner.task} is callable by this full name only: code has its own {name}")
            else:
                self._bare_names.setdefault(owner.task, []).append(name)

    def refresh(self, plugins: Iterable[NekroPlugin]) -> None:
        """List these plugins from now on: others, new versions, or the same after a change of their state."""
        # In one step, because other threads call `find` meanwhile.
        vars(self).update(vars(Registry(plugins, long_methods=self._long_methods)))

    def current(self, entry: MethodEntry) -> MethodEntry:
        """Return the entry by which a call that found ``entry`` runs: that of the newest version.

        A method that the newest version lacks, or has with another type, runs as it was.
        """
        newest = self._by_task.get(entry.task, entry)
        return newest if newest.type is entry.type else entry

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
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "`nekro methods` lists every method"
            raise MethodNotFoundError(f"no plugin has a method {name!r}; {hint}")
        if not entry.enabled:
            raise MethodDisabledError(
                f"method {entry.task} exists, but plugin {entry.plugin.key} is disabled; "
                f"`nekro plugins enable {entry.plugin.key}` enables it, unless NEKRO_PLUGINS__DISABLED has it"
            )
        return entry

    def bare_names(self, entry: MethodEntry) -> list[str]:
        """Return the short names of ``entry`` in code: its function name, its alias, both or none."""
        return self._bare_names.get(entry.task, [])

    def enabled(self) -> list[MethodEntry]:
        """Return every method that may be called."""
        return [entry for entry in self if entry.enabled]

    async def available(self, ctx: AgentCtx) -> list[MethodEntry]:
        """Return the methods of a chat's code: enabled, and selected by ``mount_collect_methods``.

        A ``mount_collect_methods`` hook that fails is logged, and selects all methods of its plugin.
        """
        entries: list[MethodEntry] = []
        enabled = self.enabled()
        for plugin in self.plugins:
            own = [entry for entry in enabled if entry.plugin is plugin]
            collect = plugin.hook("collect_methods")
            if collect is not None and own:
                own = await _collected(plugin, collect, own, ctx)
            entries += own
        return entries

    def _claim(self, name: str, entry: MethodEntry) -> None:
        winner = self._by_name.setdefault(name, entry)
        if winner is not entry:
            self._warn(
                f"method {name} exists in {winner.plugin.key} and {entry.plugin.key}: the bare name calls "
                f"{winner.task}, the other is callable as {entry.task}"
            )

    def _claim_label(self, entry: MethodEntry) -> None:
        label = entry.method.name
        if label == entry.name or not label.isidentifier() or keyword.iskeyword(label):
            return
        owner = self._by_name.setdefault(label, entry)
        if owner is not entry:
            _log.debug(f"label {label} of {entry.task} is not an alias: the name belongs to {owner.task}")

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        _log.warning(text)


def _entry(plugin: NekroPlugin, method: SandboxMethod, long_methods: Sequence[str]) -> MethodEntry:
    name = method.func.__name__
    task = f"{plugin.key}.{name}"
    doc = (method.func.__doc__ or "").strip() or None
    if doc is None:
        _log.warning(f"{task} has no docstring: it is callable, but the prompt does not list it")
    lane = getattr(method.func, LANE_ATTRIBUTE, None) or method.lane or Lane.METHODS
    if any(fnmatch.fnmatchcase(task, pattern) for pattern in long_methods):
        lane = Lane.LONG
    return MethodEntry(
        name=name,
        task=task,
        plugin=plugin,
        method=method,
        signature=describe(method.func),
        doc=doc,
        lane=Lane(lane),
    )


async def _collected(
    plugin: NekroPlugin, collect: Callable[..., Any], own: list[MethodEntry], ctx: AgentCtx
) -> list[MethodEntry]:
    plugin.refresh_config()
    try:
        chosen = await run_callable(collect, ctx.for_plugin(plugin.key))
        return _matching(plugin, own, chosen)
    except Exception as exc:  # plugin code; the other plugins' methods must stay available
        _log.opt(exception=exc).error(f"{plugin.key}: mount_collect_methods failed; it keeps all methods")
        return own


def _matching(plugin: NekroPlugin, own: list[MethodEntry], chosen: object) -> list[MethodEntry]:
    """Map what a collect hook returned (functions or ``SandboxMethod``) to entries."""
    if not isinstance(chosen, list | tuple | set):
        raise InvalidValueError(
            f"{plugin.key}: mount_collect_methods must return a list, not {type(chosen).__name__}"
        )
    by_func = {entry.method.func: entry for entry in own}
    entries = []
    for item in chosen:
        func = item.func if isinstance(item, SandboxMethod) else item
        if func not in by_func:
            name = getattr(func, "__name__", repr(func))
            raise InvalidValueError(
                f"{plugin.key}: mount_collect_methods returned {name}, "
                "which is not a mounted method of this plugin"
            )
        entries.append(by_func[func])
    return entries
