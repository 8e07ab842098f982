"""The MCP server: what each request of the protocol does, for any transport."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeAlias, TypeVar

import anyio
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    GetPromptRequestParams,
    GetPromptResult,
    ListPromptsResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    PaginatedRequestParams,
    Prompt,
    PromptArgument,
    PromptMessage,
    ReadResourceRequestParams,
    ReadResourceResult,
    SubscriptionsListenRequestParams,
    SubscriptionsListenResult,
    TextContent,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from nekro.app.services import Services
from nekro.base.plain import encodable
from nekro.base.release import release
from nekro.extensions.mcp.server import calls, resources, tools
from nekro.extensions.mcp.server.callers import Caller
from nekro.extensions.mcp.server.calls import CodeRun, request_digest
from nekro.extensions.mcp.server.methods import code_guide, find_methods, input_schema
from nekro.extensions.mcp.server.results import Report, data_result, error_result, failure_text, reported
from nekro.extensions.mcp.server.subscriptions import ListeningClients
from nekro.gateway.streams.hub import EventHub
from nekro.operations.actor import RefusedError, Scope
from nekro.plugins.entries import MethodEntry
from nekro.wire.invocation import new_id
from nekro_agent.errors import ArgumentError, MethodNotFoundError, NekroError, NotFoundError, PluginError

__all__ = ["FleetMcpServer"]

T = TypeVar("T")
Context: TypeAlias = "ServerRequestContext[Any]"
#: Code of a resource that does not exist, in the handshake versions; later ones use INVALID_PARAMS.
_RESOURCE_NOT_FOUND: Final = -32002
#: Longest words to look for: each is looked for in every method.
_MOST_WORDS_CHARS: Final = 1_000
_INSTRUCTIONS: Final = (
    "Plugins of Nekro Agent. Each method is a tool, and code that `run_code` runs in a sandbox can call all "
    "of them: prefer one program to many calls. `find_methods` and the prompt `write_code` describe the "
    "methods. Everything happens in one chat, whose history and files are resources."
)
_WRITE_CODE: Final = Prompt(
    name="write_code",
    title="Write code",
    description="How to write a program for run_code, with the methods that it may call",
    arguments=[
        PromptArgument(name="task", description="What the program is to do", required=False),
        PromptArgument(name="plugin", description="Only the methods of this plugin", required=False),
    ],
)


class FleetMcpServer:
    """The server of one process."""

    def __init__(
        self, services: Services, hub: EventHub, caller_of: Callable[[Context], Caller], *, run: CodeRun
    ) -> None:
        """Create the server.

        Args:
            hub: started.
            caller_of: returns on whose behalf a request acts.
            run: runs code.
        """
        self._services, self._hub, self._caller_of, self._run = services, hub, caller_of, run
        self.changes = ListeningClients(services, hub, caller_of)
        #: Requests of tools in sessions, by the ids of their calls.
        self._running: dict[str, anyio.CancelScope] = {}
        self.sdk: Server[Any] = Server(
            "nekro-workers",
            version=release(),
            title="nekro-workers",
            instructions=_INSTRUCTIONS,
            get_tool_input_schema=self._schema,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
            on_subscriptions_listen=self._listen,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
        )
        self.sdk.middleware.append(self._handle_cancellations)

    async def _list_tools(self, ctx: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        caller = self._caller_of(ctx)

        async def work() -> ListToolsResult:
            await self._services.refresh()
            return tools.list_tools(self._services.registry, caller, _cursor(params))

        return await self._answered(ctx, work)

    async def _call_tool(self, ctx: Context, params: CallToolRequestParams) -> CallToolResult:
        caller = self._caller_of(ctx)
        work = await self._answered(ctx, partial(self._work_of, ctx, caller, params))
        call_id, digest = new_id(), request_digest(caller, ctx.request_id)
        if digest is not None:
            await self._services.publisher.name_request(digest, call_id)
        name = digest or call_id
        with anyio.CancelScope() as scope:
            self._running[name] = scope
            try:
                return await work(call_id)
            except (NekroError, RefusedError) as exc:
                return error_result(exc, self._services)
            finally:
                if self._running.get(name) is scope:
                    del self._running[name]
        return data_result({"state": "cancelled"}, "the client cancelled the request", is_error=True)

    async def _work_of(
        self, ctx: Context, caller: Caller, params: CallToolRequestParams
    ) -> Callable[[str], Awaitable[CallToolResult]]:
        """Return what a tool does, as a function of the call's id.

        Raises:
            NotFoundError: there is no such tool.
        """
        given = params.arguments or {}
        if params.name == tools.RUN_CODE:
            return partial(self._run_code, ctx, caller, _text(given, "code"))
        if params.name == tools.FIND_METHODS:
            return lambda _: self._find_methods(caller, _text(given, "words", ""))
        if params.name == tools.SHOW_JOBS:
            shown = _text(given, "job_id") if "job_id" in given else None
            return lambda _: calls.show(caller, shown)
        if params.name == tools.WAIT_FOR_JOB:
            job_id, seconds = _text(given, "job_id"), _number(given, "seconds", 30.0)
            return lambda _: calls.wait_for(caller, job_id, seconds, report=self._report(ctx))
        if params.name == tools.CANCEL_JOB:
            job_id = _text(given, "job_id")
            return lambda _: calls.cancel(caller, job_id)
        caller.identity.require(Scope.CALL)
        entry = await self._method(params.name)
        report = self._report(ctx)
        return lambda call_id: calls.call_method(
            self._hub, caller, entry, given, call_id=call_id, report=report
        )

    async def _run_code(self, ctx: Context, caller: Caller, code: str, run_id: str) -> CallToolResult:
        async with reported(self._hub, caller.chat_key, run_id, self._report(ctx)):
            return await calls.run_code(self._run, caller, code, run_id=run_id)

    async def _method(self, name: str) -> MethodEntry:
        await self._services.refresh()
        entry = tools.method_tools(self._services.registry).get(name)
        if entry is not None:
            return entry
        try:
            # Function names and full names too; and a worker may have published it within the last second.
            return await self._services.find_method(name)
        except MethodNotFoundError:
            raise NotFoundError(
                f"there is no tool {name[:200]!r}; tools/list names those of the key"
            ) from None

    def _report(self, ctx: Context) -> Report | None:
        if ctx.meta is None or ctx.meta.get("progress_token") is None:
            return None

        async def report(number: float, end: float | None, text: str) -> None:
            await ctx.session.report_progress(number, end, str(encodable(text)) or None)

        return report

    async def _find_methods(self, caller: Caller, words: str) -> CallToolResult:
        caller.identity.require(Scope.RUN, chat_key=caller.chat_key)
        if len(words) > _MOST_WORDS_CHARS:
            raise ArgumentError(f"words has {len(words)} characters, at most {_MOST_WORDS_CHARS}")
        await self._services.refresh()
        text = str(encodable(find_methods(self._services.registry, words)))
        return CallToolResult(content=[TextContent(text=text)])

    def _schema(self, name: str) -> dict[str, Any] | None:
        entry = tools.method_tools(self._services.registry).get(name)
        return None if entry is None else input_schema(entry)

    async def _list_resources(
        self, ctx: Context, params: PaginatedRequestParams | None
    ) -> ListResourcesResult:
        work = partial(resources.list_resources, self._caller_of(ctx), _cursor(params))
        return await self._answered(ctx, work)

    async def _list_templates(
        self, ctx: Context, params: PaginatedRequestParams | None
    ) -> ListResourceTemplatesResult:
        return resources.list_templates()

    async def _read_resource(self, ctx: Context, params: ReadResourceRequestParams) -> ReadResourceResult:
        work = partial(resources.read_resource, self._caller_of(ctx), str(params.uri))
        return await self._answered(ctx, work, missing=_RESOURCE_NOT_FOUND)

    async def _listen(
        self, ctx: Context, params: SubscriptionsListenRequestParams
    ) -> SubscriptionsListenResult:
        return await self._answered(ctx, partial(self.changes.listen, ctx, params))

    async def _list_prompts(self, ctx: Context, params: PaginatedRequestParams | None) -> ListPromptsResult:
        return ListPromptsResult(prompts=[_WRITE_CODE] if self._caller_of(ctx).may(Scope.RUN) else [])

    async def _get_prompt(self, ctx: Context, params: GetPromptRequestParams) -> GetPromptResult:
        caller = self._caller_of(ctx)
        given = params.arguments or {}

        async def work() -> GetPromptResult:
            if params.name != _WRITE_CODE.name:
                raise NotFoundError(f"there is no prompt {params.name[:200]!r}")
            caller.identity.require(Scope.RUN, chat_key=caller.chat_key)
            await self._services.refresh()
            text = code_guide(self._services.registry, plugin=given.get("plugin"), task=given.get("task"))
            message = PromptMessage(role="user", content=TextContent(text=str(encodable(text))))
            return GetPromptResult(description=_WRITE_CODE.description, messages=[message])

        return await self._answered(ctx, work)

    async def _answered(
        self, ctx: Context, work: Callable[[], Awaitable[T]], *, missing: int = INVALID_PARAMS
    ) -> T:
        """Return the result of ``work``; its errors become errors of the protocol.

        Args:
            missing: code of what does not exist, in the handshake versions.
        """
        try:
            return await work()
        except (NekroError, RefusedError) as exc:
            # A chat that the key does not have is reported like one that does not exist.
            if isinstance(exc, NotFoundError) or getattr(exc, "status", None) == HTTPStatus.NOT_FOUND:
                code = INVALID_PARAMS if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS else missing
            else:
                is_theirs = isinstance(exc, (RefusedError, ArgumentError, PluginError))
                code = INVALID_PARAMS if is_theirs else INTERNAL_ERROR
            raise MCPError(code, failure_text(exc, self._services)) from exc

    async def _handle_cancellations(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        if ctx.method == "notifications/cancelled" and ctx.request_id is None:
            request_id = (ctx.params or {}).get("requestId")
            caller = self._caller_of(ctx)
            digest = request_digest(caller, request_id) if isinstance(request_id, (str, int)) else None
            if digest is not None:
                self._cancel(digest)
        return await call_next(ctx)

    def _cancel(self, digest: str) -> None:
        """Cancel a request of a session, which this process or another gateway serves."""
        scope = self._running.get(digest)
        if scope is not None:
            scope.cancel()
            return
        self._services.publisher.revoke_request(digest)


def _cursor(params: PaginatedRequestParams | None) -> str | None:
    # Some clients send an empty cursor for the first page.
    return None if params is None else params.cursor or None


def _text(given: dict[str, Any], name: str, default: str | None = None) -> str:
    value = given.get(name, default)
    if not isinstance(value, str):
        stated = f", not {value!r:.100}" if name in given else "; it is missing"
        raise ArgumentError(f"{name} must be a string{stated}")
    return value


def _number(given: dict[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ArgumentError(f"{name} must be a number, not {value!r:.100}")
    return float(value)
