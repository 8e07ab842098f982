"""What becomes of plugins' data directories where hosts share no disk.

The default follows from the plugin's code, which is read and not run. Code that keeps a database or an index
open in its directory needs one process that has it; other files are brought before a call and stored after.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

from nekro_agent.errors import SettingsError
from nekro_agent.plugin import NekroPlugin

__all__ = ["DirectoryPolicy", "PluginDirs", "PolicyChoice", "choose_policy"]


class DirectoryPolicy(StrEnum):
    """What becomes of a plugin's directory."""

    #: The plugin does not use it.
    UNUSED = "unused"
    #: Each host has its own.
    LOCAL = "local"
    #: Brought before a call, a hook or a job, and stored afterwards.
    SYNCED = "synced"
    #: One process of the fleet has it, and stores it while it runs.
    PINNED = "pinned"


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """A policy and why it was chosen."""

    policy: DirectoryPolicy
    reason: str
    #: Whether the plugin uses the database that plugins share (``resolve_db_url``).
    uses_database: bool = False


_METHODS: Final = frozenset({"get_plugin_data_dir", "get_plugin_path"})
_DATABASE: Final = "resolve_db_url"
#: Modules that keep files open, or watch them.
_HOLDING: Final = frozenset(
    {
        "aiosqlite", "annoy", "chromadb", "dbm", "diskcache", "duckdb", "faiss", "hnswlib", "lancedb", "lmdb",
        "mmap", "peewee", "plyvel", "rocksdict", "shelve", "sqlalchemy", "sqlite3", "sqlmodel", "tortoise",
        "usearch", "watchdog", "watchfiles", "whoosh", "zodb",
    }
)  # fmt: skip
#: Classes and functions that keep a file open.
_HANDLERS: Final = frozenset({"FileHandler", "RotatingFileHandler", "TimedRotatingFileHandler", "memmap"})
#: Packages of this system: a plugin in them is one module.
_OWN: Final = frozenset({"nekro", "nekro_agent", "workers"})


class PluginDirs:
    """The policies of the plugins of a worker, where files are in a store."""

    def __init__(self, overrides: Iterable[str] = ()) -> None:
        """
        Args:
            overrides: ``NEKRO_FILES__PLUGIN_DIRS``: each ``key=policy``.
        """
        parts = (item.partition("=") for item in overrides)
        self.overrides = {key.strip(): DirectoryPolicy(policy.strip()) for key, _, policy in parts}
        #: Whether a plugin runs in one process of the fleet, also by settings or an operator's decision.
        self.is_pinned: Callable[[str], bool] = lambda _: False
        self._choices: WeakKeyDictionary[NekroPlugin, PolicyChoice] = WeakKeyDictionary()
        self._by_key: dict[str, DirectoryPolicy] = {}
        self._database_users: set[str] = set()

    def choose(self, plugin: NekroPlugin) -> PolicyChoice:
        """Return the policy of a plugin; one whose directory is pinned is pinned from now on."""
        choice = self._choices.get(plugin)
        if choice is None:
            choice = self._choice(plugin)
            self._choices[plugin] = choice
        if choice.policy is DirectoryPolicy.PINNED:
            plugin.pinned = True
        chosen = choice
        if self._is_with_owner(plugin.key, choice.policy, is_pinned=plugin.pinned):
            chosen = PolicyChoice(policy=DirectoryPolicy.PINNED, reason=f"it is pinned, and {choice.reason}")
        if choice.uses_database:
            self._database_users.add(plugin.key)
        # Pins that are no declaration may end.
        self._by_key[plugin.key] = chosen.policy if plugin.pinned else choice.policy
        return chosen

    def policy_of(self, plugin_key: str) -> DirectoryPolicy:
        """Return the policy of a plugin that was chosen."""
        policy = self._by_key.get(plugin_key, DirectoryPolicy.UNUSED)
        return DirectoryPolicy.PINNED if self._is_with_owner(plugin_key, policy) else policy

    def uses_database(self, plugin_key: str) -> bool:
        """Whether a plugin runs where the database is that plugins share."""
        return plugin_key in self._database_users

    def _is_with_owner(self, plugin_key: str, policy: DirectoryPolicy, *, is_pinned: bool = False) -> bool:
        """Whether the one process that runs a plugin keeps the directory, though its code does not need that.

        Tasks that an init or a call leaves running have no end at which files could be stored.
        """
        is_chosen = policy is DirectoryPolicy.SYNCED and plugin_key not in self.overrides
        return is_chosen and (is_pinned or self.is_pinned(plugin_key))

    def require_known(self, plugin_keys: Sequence[str]) -> None:
        """Return if each override is of a plugin.

        Raises:
            SettingsError: one is not.
        """
        for key in sorted(self.overrides.keys() - set(plugin_keys)):
            raise SettingsError(
                f"NEKRO_FILES__PLUGIN_DIRS names {key}, but no plugin of that key is loaded; there are: "
                f"{', '.join(sorted(plugin_keys))}"
            )

    def _choice(self, plugin: NekroPlugin) -> PolicyChoice:
        choice = choose_policy(_sources(plugin))
        named = self.overrides.get(plugin.key)
        if named is not None:
            uses = choice.uses_database and named is DirectoryPolicy.PINNED
            return PolicyChoice(policy=named, reason="NEKRO_FILES__PLUGIN_DIRS names it", uses_database=uses)
        return choice


def choose_policy(sources: Iterable[tuple[str, str]]) -> PolicyChoice:
    """Choose by the code of a plugin.

    Args:
        sources: name and text of each of its files; one that is not Python is skipped.
    """
    uses = holds = ""
    for name, text in sources:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: it is nested too deep
            continue
        at_import = {id(node) for node in _outside_functions(tree)}
        for node in ast.walk(tree):
            place = f"{name}:{getattr(node, 'lineno', 0)}"
            word = _word(node)
            if word == _DATABASE:
                reason = f"{place} uses resolve_db_url"
                return PolicyChoice(policy=DirectoryPolicy.PINNED, reason=reason, uses_database=True)
            if word in _METHODS:
                uses = uses or f"{place} uses {word}"
            if not holds and (what := _holding(node, word, is_at_import=id(node) in at_import)):
                holds = f"{place} {what}"
    if not uses:
        return PolicyChoice(policy=DirectoryPolicy.UNUSED, reason="its code does not name the directory")
    if holds:
        return PolicyChoice(policy=DirectoryPolicy.PINNED, reason=holds)
    return PolicyChoice(policy=DirectoryPolicy.SYNCED, reason=uses)


def _word(node: ast.AST) -> str:
    """Return the name that a node has, also as text for ``getattr``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.alias):
        return node.name
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _holding(node: ast.AST, word: str, *, is_at_import: bool) -> str:
    """Return what a node keeps open, or ""."""
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        modules = [node.module or ""]
    for module in modules:
        if (top := module.partition(".")[0]) in _HOLDING:
            return f"imports {top}"
    if isinstance(node, ast.Attribute | ast.Name) and word in _HANDLERS:
        return f"uses {word}"
    if is_at_import and isinstance(node, ast.Call) and _word(node.func) == "open":
        modes = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
        if any(isinstance(mode, ast.Constant) and mode.value in _APPENDING for mode in modes):
            return "opens a file for append at import"
    return ""


_APPENDING: Final = frozenset({"a", "ab", "at", "a+", "ab+", "a+b", "at+", "a+t"})


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    left = [tree]  # not recursive: long sums and chains of calls nest deeper than calls may
    while left:
        for child in ast.iter_child_nodes(left.pop()):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield child
                left.append(child)


def _sources(plugin: NekroPlugin) -> Iterator[tuple[str, str]]:
    names = [plugin.module] if plugin.package in _OWN else [plugin.package, plugin.module]
    # The package of a plugin that is one file has none.
    file = next(filter(None, (getattr(sys.modules.get(name), "__file__", None) for name in names)), None)
    if file is None:
        return
    path = Path(file)
    for source in sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]:
        if "__pycache__" in source.parts:
            continue
        with contextlib.suppress(OSError):  # a link to nothing, as editors make them, or a directory
            yield source.name, source.read_text("utf-8", errors="replace")
