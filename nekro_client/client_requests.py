"""The requests of the clients themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Literal

from pydantic import JsonValue

from nekro_client.models import (
    Act,
    Call,
    CallBody,
    CatalogueState,
    ChatSummary,
    Command,
    CommandBody,
    CommandResult,
    CostGroup,
    Costs,
    LaneBody,
    LaneState,
    Level,
    McpReply,
    McpReplyBody,
    McpServer,
    McpServerBody,
    McpTrial,
    Method,
    Page,
    Plugin,
    PluginConfig,
    PluginState,
    Queues,
    Run,
    RunBody,
    Series,
    Worker,
)
from nekro_client.operations import Operation, operation, segment
from nekro_client.requests import request, whole_list

__all__ = ["ClientRequests", "run_body", "run_operation"]


class ClientRequests:
    """The requests of both clients."""

    @request
    def chats(
        self,
        text: str = "",
        *,
        failures_since: datetime | None = None,
        transient: bool = False,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Operation[Page[ChatSummary]]:
        """Return a page of chats, the one with the newest activity first.

        Args:
            text: only chats whose key, name or given title contains it; "" means all.
            failures_since: also count the turns that have failed since then.
            transient: also chats that one request of the OpenAI API has made for itself.
        """
        params = {
            "q": text or None,
            "failures_since": None if failures_since is None else failures_since.isoformat(),
            "transient": "true" if transient else None,
            "cursor": cursor,
            "limit": limit,
        }
        return operation("GET", "/chats", Page[ChatSummary], params=params)

    @request
    def audit(
        self,
        *,
        action: str | None = None,
        subject: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Operation[Page[Act]]:
        """Return a page of administrative acts, the newest first.

        Args:
            action: only acts that begin with it, such as ``dead_letter.``; None means all.
            subject: only acts on this; None means all.
        """
        params = {"action": action, "subject": subject, "cursor": cursor, "limit": limit}
        return operation("GET", "/audit", Page[Act], params=params)

    @request
    def run(
        self,
        code: str,
        *,
        chat_key: str,
        user_id: str | None = None,
        follow_up: bool = False,
        timeout_seconds: float | None = None,
        seconds: float = 600,
        idempotency_key: str | None = None,
    ) -> Operation[Run]:
        """Run code in the chat's sandbox; a run is stopped when the connection is lost.

        Args:
            follow_up: whether an AGENT result requests a round.
            timeout_seconds: how long it may take, with the wait for a worker; None: as the fleet allows.
            seconds: how long to wait for the report.
        """
        body = run_body(code, chat_key, user_id, follow_up, timeout_seconds)
        return run_operation(body, seconds=seconds, idempotency_key=idempotency_key)

    @request
    def call(
        self,
        method: str,
        args: Sequence[JsonValue] = (),
        kwargs: Mapping[str, JsonValue] | None = None,
        *,
        chat_key: str,
        user_id: str | None = None,
        timeout_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> Operation[Call]:
        """Call a method of a plugin; a call that fails is an ``ApiError``.

        Args:
            timeout_seconds: None means the limit of the method's lane.
        """
        body = CallBody(
            method=method,
            args=list(args),
            kwargs=dict(kwargs or {}),
            chat_key=chat_key,
            user_id=user_id,
            timeout_seconds=timeout_seconds,
        )
        seconds = _longest(timeout_seconds)
        return operation(
            "POST", "/calls", Call, body=body, idempotency_key=idempotency_key, wait_seconds=seconds
        )

    @request
    def command(
        self,
        chat_key: str,
        line: str,
        *,
        user_id: str | None = None,
        level: Level = "user",
        timeout_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> Operation[CommandResult]:
        """Run a plugin's command, or answer the last one that asked; a failed command is a result.

        Args:
            line: ``/name arguments``, or an answer.
            timeout_seconds: None means the limit of calls.
        """
        body = CommandBody(
            chat_key=chat_key, line=line, user_id=user_id, level=level, timeout_seconds=timeout_seconds
        )
        seconds = _longest(timeout_seconds)
        return operation(
            "POST",
            "/commands",
            CommandResult,
            body=body,
            idempotency_key=idempotency_key,
            wait_seconds=seconds,
        )

    @whole_list
    def commands(self) -> Operation[Page[Command]]:
        """Return the commands of the plugins."""
        return operation("GET", "/commands", Page[Command])

    @whole_list
    def methods(self) -> Operation[Page[Method]]:
        """Return the methods that code may call."""
        return operation("GET", "/methods", Page[Method])

    @request
    def catalogue(self) -> Operation[CatalogueState]:
        """Return of what the lists of methods, commands and plugins are, and what is wrong with them."""
        return operation("GET", "/catalogue", CatalogueState)

    @request
    def set_lane(self, name: str, lane: Literal["methods", "long", "pinned"]) -> Operation[LaneState]:
        """Set the lane of a method, or run a whole plugin in one process of the fleet.

        Args:
            name: of a method, or the key of a plugin for ``pinned``.
        """
        return operation("PUT", f"/lanes/{segment(name)}", LaneState, body=LaneBody(lane=lane))

    @request
    def clear_lane(self, name: str) -> Operation[LaneState]:
        """Return a method or a plugin to the lane of its code."""
        return operation("DELETE", f"/lanes/{segment(name)}", LaneState)

    @whole_list
    def plugins(self) -> Operation[Page[Plugin]]:
        """Return the plugins, also those that failed to load."""
        return operation("GET", "/plugins", Page[Plugin])

    @request
    def enable_plugin(self, key: str, *, is_enabled: bool = True) -> Operation[PluginState]:
        """Enable a plugin on all workers, or disable it; the answer says whether that changed anything."""
        action = "enable" if is_enabled else "disable"
        return operation("POST", f"/plugins/{segment(key)}/{action}", PluginState)

    @whole_list
    def mcp_servers(self) -> Operation[Page[McpServer]]:
        """Return the declared MCP servers; literal secrets are masked."""
        return operation("GET", "/mcp/servers", Page[McpServer])

    @request
    def put_mcp_server(
        self, name: str, declaration: Mapping[str, JsonValue], *, is_enabled: bool = True
    ) -> Operation[McpServer]:
        """Declare an MCP server, as in ``mcp.json``, or replace its declaration."""
        body = McpServerBody(declaration=dict(declaration), is_enabled=is_enabled)
        return operation("PUT", f"/mcp/servers/{segment(name)}", McpServer, body=body)

    @request
    def remove_mcp_server(self, name: str) -> Operation[McpServer]:
        """Remove an MCP server; returns what it was."""
        return operation("DELETE", f"/mcp/servers/{segment(name)}", McpServer)

    @request
    def test_mcp_server(self, name: str) -> Operation[McpTrial]:
        """Connect with an MCP server on the worker that uses it; ``error`` is None if it works."""
        return operation("POST", f"/mcp/servers/{segment(name)}/test", McpTrial, wait_seconds=60)

    @request
    def answer_mcp_question(
        self,
        question_id: str,
        *,
        action: Literal["accept", "decline"],
        content: Mapping[str, JsonValue] | None = None,
    ) -> Operation[McpReply]:
        """Answer a question of an MCP server, or decline to; the call that asks continues.

        Args:
            content: values by the names of the question's fields; ``""`` names the only one.
        """
        body = McpReplyBody(action=action, content=None if content is None else dict(content))
        return operation("POST", f"/mcp/questions/{segment(question_id)}/answer", McpReply, body=body)

    @request
    def plugin_config(self, key: str) -> Operation[PluginConfig]:
        """Return a plugin's configuration with its JSON schema; secrets are masked."""
        return operation("GET", f"/plugins/{segment(key)}/config", PluginConfig)

    @request
    def set_plugin_config(self, key: str, values: Mapping[str, JsonValue]) -> Operation[PluginConfig]:
        """Change fields of a plugin's configuration on all workers; returns the new one."""
        path = f"/plugins/{segment(key)}/config"
        return operation("PATCH", path, PluginConfig, body={"values": dict(values)})

    @request
    def ready(self) -> Operation[None]:
        """Return if the gateway and its database answer.

        Raises:
            UnavailableError: the database does not.
            UnreachableError: the gateway does not.
        """
        return Operation(method="GET", path="/readyz", parse=lambda response: None)

    @whole_list
    def workers(self) -> Operation[Page[Worker]]:
        """Return the workers that are alive."""
        return operation("GET", "/workers", Page[Worker])

    @request
    def costs(
        self,
        *,
        by: CostGroup = "day",
        since: date | None = None,
        until: date | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Operation[Costs]:
        """Return a page of what was spent; the first page has the budgets of today too.

        Args:
            since, until: days (UTC), both included; None does not limit.
        """
        params = {
            "by": by,
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "cursor": cursor,
            "limit": limit,
        }
        return operation("GET", "/costs", Costs, params=params)

    @request
    def series(self, *, since: datetime | None = None, until: datetime | None = None) -> Operation[Series]:
        """Return figures over time: turns, how long they took, requests to models, tokens and cost.

        Args:
            since, until: with a time zone, at most 92 days apart; None means a day before the end, and now.
        """
        times = {"since": since, "until": until}
        params = {name: None if at is None else at.isoformat() for name, at in times.items()}
        return operation("GET", "/series", Series, params=params)

    @request
    def queues(self) -> Operation[Queues]:
        """Return what waits and runs in the queues, as rounds and as jobs."""
        return operation("GET", "/queues", Queues)


def run_body(
    code: str, chat_key: str, user_id: str | None, follow_up: bool, timeout_seconds: float | None
) -> RunBody:
    """Return the body of a run."""
    return RunBody(
        code=code, chat_key=chat_key, user_id=user_id, follow_up=follow_up, timeout_seconds=timeout_seconds
    )


def run_operation(body: RunBody, *, seconds: float, idempotency_key: str | None) -> Operation[Run]:
    """Return the request of a run."""
    return operation("POST", "/runs", Run, body=body, wait_seconds=seconds, idempotency_key=idempotency_key)


def _longest(timeout_seconds: float | None) -> float:
    """Without a limit of its own, a call has the one of its lane, which the client does not know."""
    return 3600.0 if timeout_seconds is None else timeout_seconds
