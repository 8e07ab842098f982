"""One session with a server: handshake, listing of tools, calls; built on the protocol's SDK.

What the SDK validates does not come from the server: see ``dispatcher``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from loguru import logger
from mcp.client.session import ClientSession
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost, listen
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import find_invalid_x_mcp_header
from mcp_types import (
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    REQUEST_TIMEOUT,
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestParams,
    ErrorData,
    Implementation,
    InputRequest,
    InputRequiredResult,
    InputResponse,
    InputResponses,
    LoggingMessageNotificationParams,
    PaginatedRequestParams,
    ToolListChangedNotification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import TypeAdapter, ValidationError

from nekro.base.tasks import end_tasks
from nekro.extensions.mcp.client.bodies import Fate
from nekro.extensions.mcp.client.faults import ServerFault, fault_of
from nekro.extensions.mcp.client.messages import VALUE, ClientDispatcher
from nekro.extensions.mcp.client.tools import HEADER_FAULT, Listing, line

__all__ = ["Exchange", "McpSession"]

_MOST_PAGES: Final = 100
_MOST_INPUT_ROUNDS: Final = 10
#: Requests of a server for input in one answer.
_MOST_INPUTS: Final = 8
#: Pause before a server that only wants to be asked again.
_STATE_ONLY_SECONDS: Final = 0.1
_MOST_LOG_CHARS: Final = 1_000
_LOGS_PER_MINUTE: Final = 60
_LEVELS: Final = {"debug": "DEBUG", "info": "INFO", "notice": "INFO", "warning": "WARNING"}
_Result: Final[TypeAdapter[CallToolResult | InputRequiredResult]] = TypeAdapter(
    CallToolResult | InputRequiredResult
)
#: Longer cursors are refused, because each is sent back.
_MOST_CURSOR_CHARS: Final = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What a server may do during a call."""

    on_progress: ProgressFnT
    #: Answers a request of the server for a model's or a person's answer; an error refuses it.
    on_input: Callable[[InputRequest], Awaitable[InputResponse | ErrorData]]
    #: Chat of the call; None without one.
    chat_key: str | None


class _OpenCall:
    """A call that a server serves, with the requests of the server that it has caused."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._inputs: set[asyncio.Task[InputResponse | ErrorData]] = set()

    async def answer(self, request: InputRequest) -> InputResponse | ErrorData:
        """Answer a request of the server, unless the call ends before."""
        task = asyncio.ensure_future(self.exchange.on_input(request))
        self._inputs.add(task)
        try:
            await asyncio.wait([task])
            is_over = task.cancelled()
            return _error("the call has ended") if is_over else task.result()
        finally:
            task.cancel()
            self._inputs.discard(task)

    def end(self) -> None:
        """Stop answering."""
        for task in self._inputs:
            task.cancel()


class McpSession:
    """One open session; calls of several chats share it."""

    def __init__(
        self,
        name: str,
        streams: tuple[Any, Any],
        *,
        hide: Callable[[str], str],
        initialize_first: bool = False,
        samples: bool = False,
        asks: bool = False,
    ) -> None:
        """Create a session on the streams of a transport; enter it before its use.

        Args:
            hide: removes secrets from texts.
            initialize_first: whether the first message is ``initialize``, as older servers expect, and not
                the question for the newest version.
            samples: whether the server learns that it may ask for answers of a model.
            asks: whether the server learns that it may ask a person.
        """
        self._name, self._hide, self._initialize_first = name, hide, initialize_first
        self._dispatcher = ClientDispatcher(*streams)
        self._session = ClientSession(
            dispatcher=self._dispatcher,
            sampling_callback=self._on_sampling if samples else None,
            elicitation_callback=self._on_elicitation if asks else None,
            logging_callback=self._on_log,
            log_level="info",
            message_handler=self._on_message,
            client_info=Implementation(name="nekro-workers", version="1"),
        )
        #: Whether the first message was not ``initialize``, and the server did not understand it.
        self.has_asked_first = False
        #: Whether the server did not answer that message at all.
        self.has_ignored_first = False
        #: Set when the tools may have changed.
        self.is_stale = asyncio.Event()
        #: Set when requests cannot be answered any more.
        self.is_broken = asyncio.Event()
        self._calls: list[_OpenCall] = []
        self.used_at = time.monotonic()
        self._logged: list[float] = []
        self._listener: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no call is open."""
        return not self._calls

    @property
    def about(self) -> dict[str, Any]:
        """What the server says about itself, bounded."""
        info = self._session.server_info
        return {
            "name": line(info.name, 100) if info else "",
            "version": line(info.version, 100) if info else "",
            "protocol": line(self._dispatcher.stated_version or self._session.protocol_version or "", 40),
            "instructions": line(self._session.instructions or "", 2_000),
        }

    async def __aenter__(self) -> Self:
        await self._session.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await end_tasks(self._listener)
        finally:
            await self._session.__aexit__(kind, error, trace)

    async def greet(self) -> None:
        """Negotiate the protocol: the newest version, else the handshake of older ones.

        Raises:
            ServerFault: the server refused.
        """
        try:
            await self._negotiate()
        except MCPError as exc:
            if exc.code == UNSUPPORTED_PROTOCOL_VERSION:
                raise ServerFault(f"it speaks no version of the protocol that is known here: {exc}") from exc
            raise self._fault(exc) from exc
        except (RuntimeError, ValidationError) as exc:
            raise ServerFault(f"its handshake is invalid: {line(exc, 300)}") from exc
        if self._session.protocol_version in MODERN_PROTOCOL_VERSIONS:
            self._dispatcher.mirrors_arguments = True
            self._listener = asyncio.create_task(self._listen(), name="mcp-listen")

    async def _negotiate(self) -> None:
        if not self._initialize_first:
            try:
                await self._session.discover()
                return
            except MCPError as exc:
                if exc.data == Fate.NOT_SENT:
                    raise
                self.has_ignored_first = exc.code == REQUEST_TIMEOUT
            except (RuntimeError, ValidationError):
                pass  # it answers, and with no version of the newer kind
            self.has_asked_first = True
        try:
            await self._session.initialize()
        except MCPError as exc:
            if exc.code != UNSUPPORTED_PROTOCOL_VERSION:
                raise
            # It speaks the newest version, and started so slowly that the first question timed out here.
            await self._session.discover()

    async def listing(self) -> Listing:
        """List the tools, with notes on what is wrong with the listing.

        Raises:
            ServerFault: the server failed before it listed a tool.
        """
        listing = Listing()
        capabilities = self._session.server_capabilities
        if capabilities is None or capabilities.tools is None:
            return listing
        # An empty cursor is the end of a listing, except in the newest version.
        is_modern = self._session.protocol_version in MODERN_PROTOCOL_VERSIONS
        cursors: set[str] = set()
        cursor: str | None = None
        for number in range(1, _MOST_PAGES + 1):
            try:
                page = await self._page(cursor)
            except ServerFault as exc:
                if number == 1 or exc.is_refused or exc.is_unsent:
                    raise
                listing.note(None, f"page {number} of the listing failed: {exc}")
                return listing
            has_more = listing.add(page["tools"])
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or (not cursor and not is_modern):
                return listing
            if cursor in cursors or not has_more or len(cursor) > _MOST_CURSOR_CHARS:
                listing.note(None, f"page {number} of the listing names a next page that has nothing new")
                return listing
            cursors.add(cursor)
            if listing.is_full:
                listing.note(None, f"the listing goes on; only the first {len(listing.tools)} tools are used")
                return listing
        listing.note(None, f"the listing goes on after {_MOST_PAGES} pages; further tools are not used")
        return listing

    async def _page(self, cursor: str | None) -> dict[str, Any]:
        params = None if cursor is None else PaginatedRequestParams(cursor=cursor)
        try:
            page = self._dispatcher.original(await self._session.list_tools(params=params))
        except MCPError as exc:
            if exc.code == METHOD_NOT_FOUND and cursor is None:
                return {"tools": []}  # it has none
            raise self._fault(exc) from exc
        except ValidationError as exc:
            raise ServerFault(f"its listing of tools is invalid: {line(exc, 500)}") from exc
        tools = page.get("tools", page.get(VALUE))
        if not isinstance(tools, list | None):
            raise ServerFault("its listing of tools is not a list")
        if self._session.protocol_version in MODERN_PROTOCOL_VERSIONS:
            tools = [_with_checked_headers(tool) for tool in tools or ()]
        return {**page, "tools": tools or []}

    async def call(
        self, tool: str, arguments: dict[str, Any], *, exchange: Exchange, seconds: float | None
    ) -> dict[str, Any]:
        """Call a tool and return its result as the server sent it; cancelling this cancels the request there.

        Args:
            seconds: how long the server may take; None leaves that to the caller.

        Raises:
            ServerFault: the server did not answer, or with an error of the protocol.
        """
        self.used_at = time.monotonic()
        params = CallToolRequestParams(name=tool, arguments=arguments)
        with self._open(exchange) as opened:
            for _ in range(_MOST_INPUT_ROUNDS):
                result = await self._request(params, exchange, seconds)
                if isinstance(result, CallToolResult):
                    return self._dispatcher.original(result)
                params = CallToolRequestParams(
                    name=tool,
                    arguments=arguments,
                    input_responses=await self._inputs(result, opened),
                    request_state=result.request_state,
                )
        raise ServerFault(f"it asked for input more than {_MOST_INPUT_ROUNDS} times")

    async def _request(
        self, params: CallToolRequestParams, exchange: Exchange, seconds: float | None
    ) -> CallToolResult | InputRequiredResult:
        try:
            return await self._session.send_request(
                CallToolRequest(params=params),
                _Result,
                request_read_timeout_seconds=seconds,
                progress_callback=exchange.on_progress,
            )
        except MCPError as exc:
            raise self._fault(exc) from exc
        except ValidationError as exc:
            raise ServerFault(f"its answer is invalid: {line(exc, 500)}") from exc

    # -- requests of the server -----------------------------------------------------

    async def _inputs(self, result: InputRequiredResult, opened: _OpenCall) -> InputResponses | None:
        """Answer what a result asks for; None if the server only wants to be asked again."""
        if not result.input_requests:
            await asyncio.sleep(_STATE_ONLY_SECONDS)
            return None
        if len(result.input_requests) > _MOST_INPUTS:
            raise ServerFault(
                f"it asked for {len(result.input_requests)} inputs; the limit is {_MOST_INPUTS}"
            )
        answers: InputResponses = {}
        for key, request in result.input_requests.items():
            answer = await opened.answer(request)
            if isinstance(answer, ErrorData):
                raise ServerFault(answer.message)
            answers[key] = answer
        return answers

    async def _on_sampling(self, context: object, params: CreateMessageRequestParams) -> Any:
        return await self._answer(CreateMessageRequest(params=params))

    async def _on_elicitation(self, context: object, params: ElicitRequestParams) -> Any:
        return await self._answer(ElicitRequest(params=params))

    async def _answer(self, request: InputRequest) -> InputResponse | ErrorData:
        """Answer a request in an older version of the protocol, where it does not name its call."""
        chats = {one.exchange.chat_key for one in self._calls}
        if len(chats) == 1:
            return await self._calls[-1].answer(request)
        if not chats:
            return _error("no call is open")
        return _error("calls of several chats are open, so it is unknown whose request this is; call again")

    # -- notifications of the server ------------------------------------------------

    async def _on_log(self, params: LoggingMessageNotificationParams) -> None:
        """Write a message of the server to the log, at most 60 per minute."""
        now = time.monotonic()
        self._logged = [at for at in self._logged if now - at < 60]
        if len(self._logged) >= _LOGS_PER_MINUTE:
            return
        self._logged.append(now)
        text = self._hide(line(params.data, _MOST_LOG_CHARS))
        level = _LEVELS.get(params.level, "WARNING")
        logger.bind(server=self._name, level=params.level, text=text).log(level, "mcp_log")

    async def _on_message(self, message: object) -> None:
        """Notice that the tools may have changed."""
        if isinstance(message, ToolListChangedNotification):
            self.is_stale.set()

    async def _listen(self) -> None:
        with contextlib.suppress(MCPError, SubscriptionLost, ListenNotSupportedError, TimeoutError):
            async with listen(self._session, tools_list_changed=True) as subscription:
                async for _ in subscription:
                    self.is_stale.set()

    @contextmanager
    def _open(self, exchange: Exchange) -> Iterator[_OpenCall]:
        opened = _OpenCall(exchange)
        self._calls.append(opened)
        try:
            yield opened
        finally:
            self._calls.remove(opened)
            opened.end()
            self.used_at = time.monotonic()

    def _fault(self, exc: MCPError) -> ServerFault:
        fault = fault_of(exc, hide=self._hide)
        if fault.breaks_session:
            self.is_broken.set()
        return fault


def _error(text: str) -> ErrorData:
    return ErrorData(code=INVALID_REQUEST, message=text)


def _with_checked_headers(tool: Any) -> Any:
    """Return a tool; without its schema, if the SDK does not send the headers that the schema asks for.

    A server of the newest version refuses calls without them.
    """
    if not isinstance(tool, dict) or not isinstance(tool.get("inputSchema"), dict):
        return tool
    try:
        fault = find_invalid_x_mcp_header(tool["inputSchema"])
    except RecursionError:
        fault = None
    return tool if fault is None else {**tool, HEADER_FAULT: line(fault, 200)}
