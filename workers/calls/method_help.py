"""The plugins and methods that a chat may use, and the bounded answers of `help_of` and `search_tools`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from nekro.agent.model import MethodBrief
from nekro.agent.text import attribute, method_line, method_text, summary
from nekro.plugins.entries import MethodEntry, PluginEntry
from nekro.plugins.entry_registry import Registry
from nekro_agent.errors import ArgumentError
from nekro_agent.methods import BUILT_IN_METHODS, SandboxMethodType

if TYPE_CHECKING:
    from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = [
    "MOST_HELP_CHARS",
    "MOST_NAMES",
    "MOST_RESULTS",
    "ChatPlugin",
    "help_text",
    "method_brief",
    "names_of",
    "plugin_text",
    "plugins_of_chat",
    "search",
    "similar",
]


_MUST_BE_APPROVED: Final = (
    "A person must approve each call. Unless one did before, your program ends at the call, and you see the "
    "result after the decision."
)


@dataclass(frozen=True, kw_only=True)
class ChatPlugin:
    """A plugin, with those of its methods that a chat may use."""

    entry: PluginEntry
    methods: Sequence[MethodBrief]
    #: The methods by each of their names.
    names: dict[str, MethodBrief]


async def plugins_of_chat(registry: Registry, ctx: AgentCtx) -> list[ChatPlugin]:
    """Return the plugins that serve the chat, those with methods, as its prompts list them."""
    available: dict[str, list[MethodEntry]] = {}
    for entry in await registry.available(ctx):
        available.setdefault(entry.plugin_key, []).append(entry)
    return [
        _chat_plugin(registry, plugin, available[plugin.key])
        for plugin in registry.plugins
        if plugin.key in available and _serves(plugin, ctx.adapter_key)
    ]


def method_brief(registry: Registry, entry: MethodEntry) -> MethodBrief:
    """Return a method as the prompt shows it; one without a bare name has its full name."""
    name = entry.name if entry.name in registry.bare_names(entry) else entry.task
    return _brief(name, entry.signature, entry.doc, entry.type, entry.requires_approval)


@lru_cache(maxsize=4096)
def _brief(
    name: str, signature: str, doc: str | None, kind: SandboxMethodType, requires_approval: bool
) -> MethodBrief:
    """Return one object for all prompts of a method, so that comparing prompts takes no time."""
    if doc is not None and requires_approval:
        doc = f"{doc}\n\n{_MUST_BE_APPROVED}"
    return MethodBrief(name=name, signature=signature, doc=doc, type=kind)


def names_of(registry: Registry, entries: Iterable[MethodEntry]) -> dict[str, str]:
    """Return the names of methods in the prompt by their tasks."""
    return {entry.task: method_brief(registry, entry).name for entry in entries}


def _chat_plugin(registry: Registry, plugin: PluginEntry, entries: Sequence[MethodEntry]) -> ChatPlugin:
    names: dict[str, MethodBrief] = {}
    for entry in entries:
        brief = method_brief(registry, entry)
        names |= dict.fromkeys((entry.task, brief.name, *registry.bare_names(entry)), brief)
    briefs = list({brief.name: brief for brief in names.values()}.values())
    return ChatPlugin(entry=plugin, methods=briefs, names=names)


def _serves(plugin: PluginEntry, adapter_key: str | None) -> bool:
    # As `NekroPlugin.serves`.
    return not plugin.adapters or not adapter_key or adapter_key in plugin.adapters


#: Longest answer of `help_of`; a single method is shorter.
MOST_HELP_CHARS: Final = 12_000

MOST_NAMES: Final = 20

MOST_RESULTS: Final = 50

_MOST_WORDS: Final = 20

_MOST_WORD_CHARS: Final = 500

_SIGNATURE_CHARS: Final = 200


def help_text(plugins: Sequence[ChatPlugin], names: Sequence[str]) -> str:
    """Return signature and documentation of the methods of these names; similar names for unknown ones.

    The name of a plugin stands for a list of its methods.

    Raises:
        ArgumentError: no name, too many names, or one that is not text.
    """
    if not 1 <= len(names) <= MOST_NAMES or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"help_of takes 1 to {MOST_NAMES} names as texts, not {len(names)} values")
    texts: list[str] = []
    left = MOST_HELP_CHARS
    for at, name in enumerate(names):
        text = _help(plugins, name)
        if len(text) > left and texts:
            rest = ", ".join(attribute(name) for name in names[at:])
            texts.append(f"Not shown for lack of space, ask for them again: {rest}")
            break
        texts.append(text)
        left -= len(text)
    return "\n\n".join(texts)


def plugin_text(plugin: ChatPlugin) -> str:
    """Return the methods of a plugin: in full as far as they fit, the others in a line or by their number."""
    texts: list[str] = []
    for write in (method_text, method_line):
        texts = [write(method) for method in plugin.methods]
        if sum(map(len, texts)) <= MOST_HELP_CHARS:
            return "\n".join(texts)
    shown: list[str] = []
    chars = MOST_HELP_CHARS
    for text in texts:
        chars -= len(text)
        if chars < 0:
            break
        shown.append(text)
    return "\n".join([*shown, f"{len(texts) - len(shown)} more methods; `search_tools` finds them."])


def search(plugins: Iterable[ChatPlugin], words: object, limit: object = 10) -> list[dict[str, str]]:
    """Return the methods that match words best, or those with similar names if no method matches.

    Raises:
        ArgumentError: the words are not text or too long, or the limit is out of its range.
    """
    if not isinstance(words, str) or len(words) > _MOST_WORD_CHARS:
        raise ArgumentError(f"search_tools takes words as a text of at most {_MOST_WORD_CHARS} characters")
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_RESULTS:
        raise ArgumentError(f"search_tools: limit={limit!r} must be a number from 1 to {MOST_RESULTS}")
    wanted = list(dict.fromkeys(re.findall(r"[^\W_]+", words.casefold())))[:_MOST_WORDS]
    found = [_Match.of(plugin, method, wanted) for plugin in plugins for method in plugin.methods]
    matches = sorted((match for match in found if match.score), key=lambda match: match.order)
    if not matches:
        near = similar(words, (match.method.name for match in found))
        matches = [match for name in near for match in found if match.method.name == name]
    return [match.described() for match in matches[:limit]]


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return up to five known names that are spelled like a name, the nearest first."""
    folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name[:_MOST_WORD_CHARS].casefold(), folded, n=5, cutoff=0.5)
    return [folded[one] for one in near]


def _help(plugins: Sequence[ChatPlugin], name: str) -> str:
    for plugin in plugins:
        if name in plugin.names:
            return f"{method_text(plugin.names[name])}\n(plugin {attribute(plugin.entry.module_name)})"
    if name in BUILT_IN_METHODS:
        return method_text(MethodBrief(**vars(BUILT_IN_METHODS[name])))
    for plugin in plugins:
        if name in (plugin.entry.module_name, plugin.entry.key):
            lines = "\n".join(method_line(method) for method in plugin.methods)
            if len(lines) > MOST_HELP_CHARS:
                lines = plugin_text(plugin)
            return f"Methods of plugin {attribute(plugin.entry.module_name)}:\n{lines}"
    near = similar(name, (known for plugin in plugins for known in plugin.names))
    hint = f"similar names: {', '.join(near)}" if near else "`search_tools` finds methods by words"
    return f"This chat has no method or plugin named {attribute(name)}; {hint}."


@dataclass(frozen=True, kw_only=True)
class _Match:
    """How well a method matches words."""

    plugin: ChatPlugin
    method: MethodBrief
    #: Words that it has.
    words: int
    score: int

    @classmethod
    def of(cls, plugin: ChatPlugin, method: MethodBrief, wanted: Sequence[str]) -> _Match:
        name, doc = method.name.casefold(), (method.doc or "").casefold()
        head = summary(method.doc).casefold()
        home = f"{plugin.entry.module_name} {plugin.entry.name}".casefold()
        parts = set(re.findall(r"[^\W_]+", name))
        scores = [
            _score(word, parts=parts, texts=((name, 4), (home, 3), (head, 2), (doc, 1))) for word in wanted
        ]
        return cls(plugin=plugin, method=method, words=sum(map(bool, scores)), score=sum(scores))

    @property
    def order(self) -> tuple[int, int, str]:
        return (-self.words, -self.score, self.method.name)

    def described(self) -> dict[str, str]:
        signature = self.method.signature
        if len(signature) > _SIGNATURE_CHARS:
            signature = signature[: _SIGNATURE_CHARS - 1] + "…"
        return {
            "name": self.method.name,
            "signature": signature,
            "summary": summary(self.method.doc),
            "plugin": self.plugin.entry.module_name,
        }


def _score(word: str, *, parts: set[str], texts: Sequence[tuple[str, int]]) -> int:
    """Return the points of one word; its singular counts too."""
    forms = [word, word[:-1]] if len(word) > 3 and word.endswith("s") else [word]
    if parts.intersection(forms):
        return 6
    return max((points for text, points in texts if any(form in text for form in forms)), default=0)
