"""The list of plugins and methods in the system prompt: in full, or shortened to a budget in tokens.

A list that exceeds the budget shortens all methods: to one line per method, to their names, or to their
number, whichever is the first to fit into three quarters of it. In the rest it shows in full what the chat
used lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from jinja2 import Environment

from nekro.agent.model import PluginBrief
from nekro.agent.room import PromptRoom
from nekro.agent.text import attribute, method_line, method_text, neutralise

__all__ = ["CatalogueForm", "CatalogueWriter", "PromptCatalogue"]

_BRIEF_CHARS: Final = 500
#: Short lists that are kept: of about so many chats whose rounds run by turns.
_MOST_KEPT: Final = 32


class CatalogueForm(StrEnum):
    """How methods are listed, from the longest form to the shortest."""

    #: Signature and documentation.
    FULL = "full"
    #: Name and first line of the documentation.
    LINES = "lines"
    NAMES = "names"
    #: The number of methods of each plugin.
    COUNTS = "counts"


@dataclass(frozen=True, kw_only=True)
class PromptCatalogue:
    """A list as the prompt shows it."""

    text: str
    form: CatalogueForm
    has_asleep: bool

    @property
    def is_short(self) -> bool:
        """Whether methods are not shown in full."""
        return self.form is not CatalogueForm.FULL


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """A plugin in the form that the template shows."""

    plugin: PluginBrief
    brief: str
    #: Texts of the methods that are shown in full or in a line, in their order.
    methods: list[str]
    names: list[str]
    count: int


@dataclass(frozen=True, kw_only=True)
class _Known:
    """The full list of some plugins, and the short ones made of it."""

    shown: object
    full: PromptCatalogue
    #: Tokens of the full list, by the name of the counter.
    tokens: dict[str, int]
    #: By counter, budget and recent methods.
    short: dict[tuple[str, int, tuple[str, ...]], PromptCatalogue]


class CatalogueWriter:
    """Writes lists; keeps the last full one, and the short ones made of it, for the prompts to come.

    Thread-safe: each call works on the ``_Known`` that it has found or made.
    """

    def __init__(self, templates: Environment) -> None:
        self._template = templates.get_template("catalogue.j2")
        self._last: _Known | None = None

    def is_long(self, plugins: Sequence[PluginBrief], room: PromptRoom) -> bool:
        """Whether the full list exceeds ``room.limits.catalogue``."""
        return _exceeds(self._known(plugins), room)

    def write(
        self, plugins: Sequence[PluginBrief], room: PromptRoom, recent: Sequence[str] = ()
    ) -> PromptCatalogue:
        """Return the list of plugins that are in order.

        Args:
            recent: names of the methods that the chat used lately, the last used first.
        """
        known = self._known(plugins)
        if not _exceeds(known, room):
            return known.full
        key = (room.counter.name, room.limits.catalogue, tuple(recent))
        short = known.short.get(key)
        if short is None:
            if len(known.short) >= _MOST_KEPT:
                known.short.clear()
            known.short[key] = short = self._shortened(plugins, room, recent)
        return short

    def _shortened(
        self, plugins: Sequence[PluginBrief], room: PromptRoom, recent: Sequence[str]
    ) -> PromptCatalogue:
        form, shown = self._fitting(plugins, room, recent)
        hidden = len(plugins) - len(shown)
        short = self._render(shown, form, frozenset(), hidden=hidden)
        left = room.limits.catalogue - room.counter.count(short.text)
        kept = _kept(shown, recent, room, left=left)
        return self._render(shown, form, kept, hidden=hidden) if kept else short

    def _fitting(
        self, plugins: Sequence[PluginBrief], room: PromptRoom, recent: Sequence[str]
    ) -> tuple[CatalogueForm, Sequence[PluginBrief]]:
        """Return the longest form that leaves space for recent methods, and the plugins that it can show."""
        most = room.limits.catalogue * 3 // 4
        for form in (CatalogueForm.LINES, CatalogueForm.NAMES):
            if room.counter.count(self._render(plugins, form, frozenset()).text) <= most:
                return form, plugins
        used = set(recent)
        by_use = sorted(plugins, key=lambda plugin: used.isdisjoint(m.name for m in plugin.methods))
        shown = set()
        for plugin in by_use:
            tokens = room.counter.count(self._render([plugin], CatalogueForm.COUNTS, frozenset()).text)
            if tokens <= most:
                shown.add(plugin.key)
                most -= tokens
        return CatalogueForm.COUNTS, [plugin for plugin in plugins if plugin.key in shown]

    def _known(self, plugins: Sequence[PluginBrief]) -> _Known:
        shown = [
            (plugin.name, plugin.module_name, plugin.methods, plugin.asleep, plugin.turns_left)
            for plugin in plugins
        ]
        known = self._last
        if known is None or shown != known.shown:
            full = self._render(plugins, CatalogueForm.FULL, frozenset())
            self._last = known = _Known(shown=shown, full=full, tokens={}, short={})
        return known

    def _render(
        self, plugins: Sequence[PluginBrief], form: CatalogueForm, kept: frozenset[str], *, hidden: int = 0
    ) -> PromptCatalogue:
        listed = [_listed(plugin, form, kept) for plugin in plugins]
        text = self._template.render(plugins=listed, hidden=hidden) if listed or hidden else ""
        has_asleep = any(plugin.asleep is not None for plugin in plugins)
        return PromptCatalogue(text=text, form=form, has_asleep=has_asleep)


def _exceeds(known: _Known, room: PromptRoom) -> bool:
    if not room.limits.catalogue:
        return False
    counter = room.counter
    if counter.name not in known.tokens:
        known.tokens[counter.name] = counter.count(known.full.text)
    return known.tokens[counter.name] > room.limits.catalogue


def _kept(
    plugins: Sequence[PluginBrief], recent: Sequence[str], room: PromptRoom, *, left: int
) -> frozenset[str]:
    """Return the names of recent methods that fit into some tokens, the last used first."""
    methods = {
        method.name: method for plugin in plugins if plugin.asleep is None for method in plugin.methods
    }
    kept: set[str] = set()
    for name in recent:
        tokens = room.counter.count(method_text(methods[name])) + 1 if name in methods else 0
        if 0 < tokens <= left and name not in kept:
            kept.add(name)
            left -= tokens
    return frozenset(kept)


def _listed(plugin: PluginBrief, form: CatalogueForm, kept: frozenset[str]) -> _Listed:
    if plugin.asleep is not None:
        brief = attribute(plugin.asleep, limit=_BRIEF_CHARS)
        return _Listed(plugin=plugin, brief=brief, methods=[], names=[], count=0)
    methods, others = [], []
    for method in plugin.methods:
        if form is CatalogueForm.FULL:
            methods.append(method_text(method, limit=None))
        elif method.name in kept:
            methods.append(method_text(method))
        elif form is CatalogueForm.LINES:
            methods.append(method_line(method))
        else:
            others.append(neutralise(method.name))
    names = others if form is CatalogueForm.NAMES else []
    return _Listed(plugin=plugin, brief="", methods=methods, names=names, count=len(others))
