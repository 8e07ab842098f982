"""Which operation each method of the client is where there is no gateway.

An operation has the arguments of the client's method; a test compares them. ``Param(alias=…)`` gives an
argument another name in URLs. Where that does not suffice, an entry names a function that takes the actor and
the method's arguments.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from nekro.cli.gateway_client import invalid
from nekro.cli.local_chats import download_file, send_message, store_file, upload_file
from nekro.cli.local_events import ended_turn, last_event_number
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from nekro.operations.actor import Actor
    from nekro_client.models import CommandBody, CommandResult, PluginState

__all__ = ["CHAT", "OPERATIONS", "Operation"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation, and how it answers a method of the client."""

    #: As ``module.function`` of ``nekro.operations``, or with the path of an extension's module, imported at
    #: first use; or a function of an actor.
    target: str | Callable[..., Awaitable[Any]]
    #: Name of the model that the keywords become the fields of (``nekro_client.models``); "": of none.
    body: str = ""
    #: Fields of the body that the method's name says.
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the method returns the items of all pages.
    is_whole: bool = False
    #: Whether the operation uses the database.
    needs_database: bool = True

    @property
    def function(self) -> Callable[..., Awaitable[Any]]:
        """The function of an actor."""
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.rpartition(".")
        path = module if module.startswith("nekro.") else f"nekro.operations.{module}"
        found: Callable[..., Awaitable[Any]] = getattr(import_module(path), name)
        return found

    @property
    def model(self) -> type[Any]:
        """The model of the body."""
        kind: type[Any] = getattr(import_module("nekro_client.models"), self.body)
        return kind

    async def call(self, actor: Actor, *args: Any, **given: Any) -> Any:
        """Run it with the arguments of the client's method; may return a page of the whole list.

        Raises:
            UsageError: the keywords are no valid body.
        """
        if not self.body:
            return await self.function(actor, *args, **given)
        try:
            body = self.model(**self.fields, **given)
        except ValueError as exc:
            raise invalid(exc) from exc
        return await self.function(actor, *args, body)


def _of(
    target: str | Callable[..., Awaitable[Any]],
    body: str = "",
    *,
    is_whole: bool = False,
    needs_database: bool = True,
    **fields: Any,
) -> Operation:
    return Operation(
        target=target, body=body, fields=fields, is_whole=is_whole, needs_database=needs_database
    )


_Table = Mapping[str, Any]


_WORK: Final[_Table] = {
    "jobs": {
        "list": _of("work.list_jobs"),
        "get": _of("work.get_job"),
        "log": _of("work.get_job_log"),
        "cancel": _of("work.cancel_job"),
        "retry": _of("work.retry_job"),
    },
    "timers": {
        "list": _of("work.list_timers"),
        "pause": _of("work.change_timer", "TimerBody", state="paused"),
        "resume": _of("work.change_timer", "TimerBody", state="waiting"),
        "delete": _of("work.delete_timer"),
    },
    "approvals": {
        "list": _of("approvals.list_approvals"),
        "get": _of("approvals.get_approval"),
        "approve": _of("approvals.decide_approval", "DecisionBody", decision="approve"),
        "deny": _of("approvals.decide_approval", "DecisionBody", decision="deny"),
        "revoke": _of("approvals.revoke_approval"),
    },
}

_FLEET: Final[_Table] = {
    "dead_letters": {
        # They are in the broker.
        "list": _of("fleet.list_dead_letters", needs_database=False),
        "get": _of("fleet.get_dead_letter", needs_database=False),
        "retry": _of("fleet.retry_dead_letter", "RetryBody"),
        "drop": _of("fleet.delete_dead_letter"),
    },
}

_ACCOUNTS: Final[_Table] = {
    "keys": {
        "list": _of("keys.list_keys", is_whole=True),
        "create": _of("keys.create_key", "KeyBody"),
        "revoke": _of("keys.revoke_key"),
    },
    "costs": _of("costs.get_costs"),
}

_TURNS: Final[_Table] = {
    "turns": {
        "list": _of("turn_lists.list_turns"),
        "get": _of("turns.get_turn"),
        "call": _of("turns.get_call"),
        "wait": _of(ended_turn),
        "cancel": _of("turns.cancel_turn"),
    },
}


async def _enable_plugin(actor: Actor, key: str, *, is_enabled: bool = True) -> PluginState:
    from nekro.operations.catalogue import disable_plugin, enable_plugin

    services: Any = actor.services
    await services.look_for(key)
    return await (enable_plugin if is_enabled else disable_plugin)(actor, key)


#: The services are ``nekro.cli.views.catalogue.CatalogueServices``; lists do without a database.
_CATALOGUE: Final[_Table] = {
    "catalogue": _of("catalogue.get_catalogue", needs_database=False),
    "methods": _of("catalogue.list_methods", is_whole=True, needs_database=False),
    "commands": _of("catalogue.list_commands", is_whole=True, needs_database=False),
    "plugins": _of("catalogue.list_plugins", is_whole=True, needs_database=False),
    "set_lane": _of("catalogue.put_lane", "LaneBody"),
    "clear_lane": _of("catalogue.delete_lane"),
    "enable_plugin": _of(_enable_plugin),
}


async def _run_command(actor: Actor, body: CommandBody) -> CommandResult:
    from nekro.cli.services.presence import awaited_with_workers
    from nekro.operations.calls import run_command

    services = actor.services
    return await awaited_with_workers(run_command(actor, body), lambda: services.app, lane=Lane.METHODS.value)


_RUNS: Final[_Table] = {"command": _of(_run_command, "CommandBody")}


_FILES: Final[_Table] = {
    "list": _of("files.list_files", is_whole=True),
    "find": _of("files.get_file_info"),
    "upload": _of(upload_file),
    "store": _of(store_file),
    "download": _of(download_file),
}

#: Operations, or tables of them, by the names of the client's attributes.
OPERATIONS: Final[_Table] = {**_WORK, **_FLEET, **_ACCOUNTS, **_TURNS, **_CATALOGUE, **_RUNS}

#: Those of a chat, ``client.chat(key)``, which take its key first.
CHAT: Final[_Table] = {
    "send": _of(send_message),
    "summary": _of("chats.get_chat"),
    "messages": _of("chats.list_messages"),
    "turns": _of("turn_lists.list_turns"),
    "rounds": _of("turns.list_rounds"),
    "summaries": _of("chats.list_summaries", is_whole=True),
    "cancel": _of("chats.cancel_chat"),
    "reset": _of("chats.reset_chat"),
    "last_event_number": _of(last_event_number),
    "plugins": _of("catalogue.list_chat_plugins", is_whole=True),
    "set_plugin": _of("catalogue.put_chat_plugin", "ChatPluginBody"),
    "files": _FILES,
}
