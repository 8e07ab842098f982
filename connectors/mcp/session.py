"""One session with a server: handshake, listing of tools, calls; built on the protocol's SDK."""

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
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_REQUEST,
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

from connectors.mcp.texts import line
from connectors.mcp.tools import MOST_TOOLS, ListedTool, bounded_listing, bounded_tool
from runtime.tasks import end_tasks

__all__ = ["Exchange", "McpSession", "ServerFault"]

_MOST_PAGES: Final = 100
_MOST_INPUT_ROUNDS: Final = 10
#: Requests of a server for input in one answer.
_MOST_INPUTS: Final = 8
#: Pause before a server that only wants to be asked again.
_STATE_ONLY_SECONDS: Final = 0.1
_MOST_LOG_CHARS: Final = 1_000
_LOGS_PER_MINUTE: Final = 60
_MOST_ERROR_CHARS: Final = 4_000
#: The SDK's words for requests that were open when the whole session ended.
_ALL_CLOSED: Final = "Connection closed"
_LEVELS: Final = {"debug": "DEBUG", "info": "INFO", "notice": "INFO", "warning": "WARNING"}
_Result: Final[TypeAdapter[CallToolResult | InputRequiredResult]] = TypeAdapter(
    CallToolResult | InputRequiredResult
)


class ServerFault(Exception):
    """A request failed: the server did not receive it (``is_unsent``), or that is unknown (``is_lost``)."""

    def __init__(
        self, text: str, *, is_unsent: bool = False, is_lost: bool = False, is_late: bool = False
    ) -> None:
        super().__init__(text)
        self.is_unsent, self.is_lost, self.is_late = is_unsent, is_lost, is_late


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


class _ClientSession(ClientSession):
    async def validate_tool_result(self, name: str, result: CallToolResult) -> None:
        """Check nothing: a hostile schema could keep the event loop busy for ever."""


class McpSession:
    """One open session; calls of several chats share it."""

    def __init__(
        self,
        name: str,
        streams: tuple[Any, Any],
        *,
        hide: Callable[[str], str],
        not_sent: str | None = None,
        samples: bool = False,
        asks: bool = False,
    ) -> None:
        """Create a session on the streams of a transport; enter it before its use.

        Args:
            hide: removes secrets from texts.
            samples: whether the server learns that it may ask for answers of a model.
            asks: whether the server learns that it may ask a person.
            not_sent: data of errors which say that the server did not receive a request; None for stdio.
        """
        self._name, self._hide, self._not_sent = name, hide, not_sent
        self._session: ClientSession = _ClientSession(
            *streams,
            sampling_callback=self._on_sampling if samples else None,
            elicitation_callback=self._on_elicitation if asks else None,
            logging_callback=self._on_log,
            log_level="info",
            message_handler=self._on_message,
            client_info=Implementation(name="nekro-workers", version="1"),
        )
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
            "protocol": self._session.protocol_version or "",
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
            self._listener = asyncio.create_task(self._listen(), name="mcp-listen")

    async def _negotiate(self) -> None:
        try:
            await self._session.discover()
            return
        except MCPError as exc:
            if exc.data == self._not_sent and self._not_sent is not None:
                raise
        except (RuntimeError, ValidationError):
            pass  # it answers, and with no version of the newer kind
        try:
            await self._session.initialize()
        except MCPError as exc:
            if exc.code != UNSUPPORTED_PROTOCOL_VERSION:
                raise
            # It speaks the newest version, and started so slowly that the first question timed out here.
            await self._session.discover()

    async def tools(self) -> list[ListedTool]:
        """List the tools.

        Raises:
            ServerFault: the server failed or sent a malformed listing.
        """
        capabilities = self._session.server_capabilities
        if capabilities is None or capabilities.tools is None:
            return []
        used: list[ListedTool] = []
        cursor: str | None = None
        left_out = 0
        try:
            for _ in range(_MOST_PAGES):
                page = await self._session.list_tools(
                    params=PaginatedRequestParams(cursor=cursor) if cursor is not None else None
                )
                # Bounded after each page: together they may be a hundred times as large as a message.
                used, more = bounded_listing([*used, *map(_listed, page.tools)])
                left_out += more
                cursor = page.next_cursor
                if cursor is None or len(used) == MOST_TOOLS:
                    break
        except MCPError as exc:
            raise self._fault(exc) from exc
        except ValidationError as exc:
            raise ServerFault(f"its listing of tools is invalid: {line(exc, 500)}") from exc
        if left_out or cursor is not None:
            logger.bind(server=self._name, tools=len(used), left_out=left_out).warning("mcp_tools_left_out")
        return used

    async def call(
        self, tool: str, arguments: dict[str, Any], *, exchange: Exchange, seconds: float | None
    ) -> CallToolResult:
        """Call a tool; cancelling this cancels the request at the server.

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
                    return result
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
        text = self._hide(line(exc.message, _MOST_ERROR_CHARS))
        if exc.code == CONNECTION_CLOSED:
            if exc.message == _ALL_CLOSED:
                self.is_broken.set()
                return ServerFault("the connection to it was lost", is_lost=True)
            return ServerFault(text, is_lost=True)  # over HTTP: the connection of this request only
        if exc.code == REQUEST_TIMEOUT:
            return ServerFault("it did not answer in time; the request was cancelled", is_late=True)
        if exc.code == INVALID_REQUEST and "session" in exc.message.lower():
            self.is_broken.set()  # an HTTP server that has forgotten the session
            return ServerFault(text, is_unsent=True)
        is_unsent = self._not_sent is not None and exc.data == self._not_sent
        is_lost = (
            not is_unsent and self._not_sent is not None and text.startswith("the server cannot be reached")
        )
        if is_unsent or is_lost:
            self.is_broken.set()
        return ServerFault(text, is_unsent=is_unsent, is_lost=is_lost)


def _error(text: str) -> ErrorData:
    return ErrorData(code=INVALID_REQUEST, message=text)


def _listed(tool: Any) -> ListedTool:
    hints = tool.annotations
    return bounded_tool(
        name=tool.name,
        title=tool.title or (hints.title if hints else None),
        description=tool.description,
        input_schema=tool.input_schema,
        output_schema=tool.output_schema,
        annotations={
            "read_only": hints.read_only_hint if hints else None,
            "destructive": hints.destructive_hint if hints else None,
            "idempotent": hints.idempotent_hint if hints else None,
            "open_world": hints.open_world_hint if hints else None,
        },
    )
