"""Methods and plugins, for the fleet and in a chat."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field, JsonValue

from nekro_client.models.base import Answer, Body, PlainJson

__all__ = [
    "CatalogueState",
    "ChatPlugin",
    "ChatPluginBody",
    "ChatPluginState",
    "LaneBody",
    "LaneState",
    "Method",
    "Plugin",
    "PluginConfig",
    "PluginConfigBody",
    "PluginState",
    "PluginVersion",
]


class Method(Answer):
    """A method of the catalogue."""

    name: str
    task: str
    plugin: str
    type: str
    lane: str
    #: Why the lane is not the method's own; None if it is.
    lane_reason: str | None = None
    signature: str
    doc: str | None = None
    #: Whether a person must approve each call.
    requires_approval: bool = False


class PluginVersion(Answer):
    """What some workers serve of a plugin."""

    version: str = ""
    #: ``ok``, ``degraded``, ``starting``, ``failed`` or ``disabled``.
    status: str
    error: str | None = None
    #: Identifies its files; "" if that is not known.
    digest: str = ""
    #: Number of its methods.
    methods: int = 0
    #: When a worker served it first.
    published_at: datetime
    #: Names of the workers, the one that started first at the beginning.
    workers: list[str]


class Plugin(Answer):
    """A plugin of the catalogue."""

    key: str
    #: ``ok``, ``degraded``, ``starting``, ``failed`` or ``disabled``.
    status: str
    name: str = ""
    description: str = ""
    version: str = ""
    author: str = ""
    error: str | None = None
    placeholders: list[str] = []
    #: Whether its methods may be called.
    is_enabled: bool = True
    #: What workers serve of it, the version that callers see first.
    versions: list[PluginVersion] = []
    #: Its file on the hosts of the workers; None for keys, which only the local one sees.
    path: str | None = None
    #: What becomes of its data directory where hosts share no disk: ``unused``, ``synced``, ``pinned`` or
    #: ``local``; None where they do.
    files: str | None = None
    files_reason: str | None = None


class CatalogueState(Answer):
    """Of what the lists of methods, commands and plugins are, and what is wrong with them."""

    #: Whether workers are live.
    is_live: bool
    #: What is listed while no worker is live; "" otherwise.
    note: str = ""
    #: Plugins that differ between workers or that some of them failed to load; settings without effect.
    warnings: list[str] = []
    #: Names of methods and commands that do not mean what their plugin intends.
    name_warnings: list[str] = []


class LaneBody(Body):
    """The lane of a method, or of a whole plugin."""

    #: ``methods`` or ``long`` for a method; ``pinned`` runs a plugin in one process of the fleet.
    lane: Literal["methods", "long", "pinned"]


class LaneState(Answer):
    """An operator's decision about a lane."""

    #: Task of the method, or key of the plugin.
    name: str
    #: None: the one of the plugin's code.
    lane: str | None = None
    #: Whether this request changed it.
    is_changed: bool


class PluginConfig(Answer):
    """The configuration of a plugin."""

    #: JSON schema of ``values``.
    schema_: dict[str, Any] = Field(alias="schema")
    #: Without secrets.
    values: dict[str, JsonValue]
    #: The secret fields (``group.field`` where nested), and whether each is set.
    secrets: dict[str, bool]


class PluginConfigBody(Body):
    """Fields of a configuration to change; the others keep their values."""

    values: dict[str, PlainJson] = Field(min_length=1)


class PluginState(Answer):
    """An operator's decision about a plugin."""

    key: str
    is_enabled: bool
    #: Whether this request changed it.
    is_changed: bool


class ChatPlugin(Answer):
    """A plugin that may sleep, in the next turn of a chat."""

    key: str
    name: str
    is_awake: bool
    #: None: it is asleep, or awake without a limit.
    turns_left: int | None = None
    #: What prompts show of it while it is asleep.
    brief: str


class ChatPluginBody(Body):
    """Whether a plugin is awake in a chat."""

    is_awake: bool
    #: For how many turns it is woken; None: without a limit.
    turns: int | None = Field(None, ge=1)


class ChatPluginState(Answer):
    """An operator's decision about a plugin in a chat."""

    key: str
    is_awake: bool
    #: Whether this request changed it.
    is_changed: bool
