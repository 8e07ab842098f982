"""Plugins, methods and commands as plain data, as workers publish them and callers read them.

The JSON form is stored in ``plugin_snapshots``. Releases of different ages read it, so a field that is
added has a default, and unknown fields are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from nekro.base.plain import known_fields
from nekro_agent.methods import Lane, SandboxMethodType

__all__ = [
    "CommandEntry",
    "MethodEntry",
    "MethodParameter",
    "PluginEntry",
    "PluginStatus",
    "RoutedEntry",
    "WebhookEntry",
    "digest_of",
]


class PluginStatus(StrEnum):
    """Result of loading a plugin."""

    OK = "ok"
    #: It works, except where it uses names of Nekro Agent that do not exist here or need a setting.
    DEGRADED = "degraded"
    FAILED = "failed"
    #: Loaded, but switched off by an operator.
    DISABLED = "disabled"
    #: Not offered yet: its import or init takes long.
    STARTING = "starting"


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodParameter:
    """One parameter of a method's function, the context included."""

    name: str
    #: Name of a member of ``inspect._ParameterKind``.
    kind: str
    is_required: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodEntry:
    """One method as the catalogue lists it."""

    #: The Python function's name; sandboxed code calls it.
    name: str
    #: ``author.module.function``: Celery task name and unambiguous name.
    task: str
    plugin_key: str
    #: Name for people; also an alias if it is an identifier that no function has.
    label: str
    #: Determines what happens to the result.
    type: SandboxMethodType
    #: Parameters and result without the context: ``(city: str) -> str``.
    signature: str
    #: Docstring, the LLM's only description; None means that the prompt does not list the method.
    doc: str | None
    lane: Lane
    #: Whether a call may run again after its worker died during it.
    repeatable: bool = False
    #: In order; None when the function cannot be inspected, and then any arguments are sent.
    parameters: tuple[MethodParameter, ...] | None = None
    #: Names of the first two parameters of a function declared as ``(argument, ctx)``; see
    #: ``nekro_agent.methods``.
    swapped: tuple[str, str] | None = None
    #: Whether a person must approve each call before it runs.
    requires_approval: bool = False
    #: Whether a call of a TOOL method runs at most once, like those of the other types.
    once: bool = False

    @property
    def is_claimed(self) -> bool:
        """Whether its calls are recorded, and claimed before they run, so that each runs at most once."""
        return self.type is not SandboxMethodType.TOOL or self.requires_approval or self.once


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEntry:
    """One command of a plugin."""

    name: str
    plugin_key: str
    aliases: tuple[str, ...] = ()
    permission: str
    usage: str = ""
    description: str = ""
    #: Not listed; meant as the continuation of another command.
    internal: bool = False

    @property
    def full_name(self) -> str:
        """``<plugin key>:<name>``, which is unique."""
        return f"{self.plugin_key}:{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WebhookEntry:
    """A function that a plugin runs when a webhook's endpoint is posted to."""

    #: Last part of the URL; several plugins may serve the same one.
    endpoint: str
    #: ``author.module.webhook:<endpoint>``, the Celery task name; no method can have it.
    task: str
    plugin_key: str
    #: Name for people.
    label: str = ""
    description: str = ""
    lane: Lane = Lane.METHODS


#: What a lane is chosen for.
RoutedEntry: TypeAlias = MethodEntry | WebhookEntry


@dataclass(frozen=True, kw_only=True)
class PluginEntry:
    """One plugin, or one that failed to load."""

    #: ``author.module``; the file's name if loading failed before the key was known.
    key: str
    status: PluginStatus = PluginStatus.OK
    #: Why it failed; None when it did not.
    error: str | None = None
    #: File or folder on the worker's host, or the distribution that provides it.
    path: str = ""
    #: SHA-256 of the plugin's files, in hexadecimal; "" when they could not be read.
    digest: str = ""
    name: str = ""
    module_name: str = ""
    description: str = ""
    version: str = ""
    author: str = ""
    url: str = ""
    #: Adapters whose chats have access to the methods; empty means all.
    adapters: tuple[str, ...] = ()
    #: Whether an operator enabled it.
    enabled: bool = True
    #: Whether it declares that it runs in one process of the fleet.
    pinned: bool = False
    #: What becomes of its data directory, and why (``nekro.plugins.data_dirs``); "" where hosts share a disk.
    files: str = ""
    files_reason: str = ""
    #: Whether its methods may be hidden behind ``sleep_brief``; None: if that is not empty.
    allow_sleep: bool | None = None
    sleep_brief: str = ""
    #: Names that it uses and that do not exist here.
    placeholders: tuple[str, ...] = ()
    methods: tuple[MethodEntry, ...] = ()
    commands: tuple[CommandEntry, ...] = ()
    #: Hooks that it registered: ``init``, ``user_message``, …
    hooks: tuple[str, ...] = ()
    #: Task types of its background jobs.
    task_types: tuple[str, ...] = ()
    webhooks: tuple[WebhookEntry, ...] = ()
    #: Whether it has HTTP routes or pages; the hook ``router`` is one reason, ``webui_path`` the other.
    serves_http: bool = False

    def to_json(self) -> str:
        """Return the stored form; equal entries have equal texts."""
        values = asdict(self)
        if self.status is PluginStatus.STARTING:  # which older releases do not know
            values |= {"status": PluginStatus.FAILED, "is_starting": True}
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PluginEntry:
        """Read what ``to_json`` of this or another release wrote."""
        stored = json.loads(text)
        values = known_fields(cls, stored)
        status = PluginStatus(values.get("status", PluginStatus.OK))
        values["status"] = PluginStatus.STARTING if stored.get("is_starting") else status
        values["methods"] = tuple(_method(method) for method in values.get("methods", ()))
        values["commands"] = tuple(
            CommandEntry(
                **{**known_fields(CommandEntry, command), "aliases": tuple(command.get("aliases", ()))}
            )
            for command in values.get("commands", ())
        )
        values["webhooks"] = tuple(_webhook(webhook) for webhook in values.get("webhooks", ()))
        for name in ("adapters", "placeholders", "hooks", "task_types"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)


def digest_of(text: str) -> str:
    """Return the digest that identifies a stored entry."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _webhook(values: Mapping[str, Any]) -> WebhookEntry:
    known = known_fields(WebhookEntry, values)
    return WebhookEntry(**{**known, "lane": Lane(known.get("lane", Lane.METHODS))})


def _method(values: Mapping[str, Any]) -> MethodEntry:
    known = known_fields(MethodEntry, values)
    known["type"], known["lane"] = SandboxMethodType(known["type"]), Lane(known["lane"])
    if known.get("parameters") is not None:
        known["parameters"] = tuple(
            MethodParameter(**known_fields(MethodParameter, one)) for one in known["parameters"]
        )
    if known.get("swapped") is not None:
        known["swapped"] = tuple(known["swapped"])
    return MethodEntry(**known)
