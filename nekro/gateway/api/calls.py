"""Calls of methods, commands of plugins, and runs of code.

A run is carried out by a rounds worker and belongs to its request: it is stopped when the client leaves. Its
answer is the report as JSON, or the output as a stream and then the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from nekro.app import use_cases
from nekro.app.calls.records import value_of
from nekro.app.catalogue import is_command, listed_commands
from nekro.app.chats.files import ChatFiles
from nekro.app.services import Services
from nekro.base.plain import to_json_value
from nekro.base.tasks import end_tasks
from nekro.gateway.dependencies import HubDep, IdentityDep, ServicesDep, take_stream
from nekro.gateway.idempotency import REPLAYED, Once, OnceDep
from nekro.gateway.problems import problem_of
from nekro.gateway.streams.events import Reader
from nekro.gateway.views import awaiting_call, finished_call, run_answer
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.responses import EVENT_STREAM, EventStream, accepts, json_text
from nekro.operations.actor import Identity, Scope
from nekro.operations.admission import begin_paying, require_rounds_worker
from nekro.operations.messages import file_info
from nekro_agent.commands.schemas import CommandExecutionContext
from nekro_agent.commands.schemas import CommandResponse as PluginResponse
from nekro_agent.errors import NekroError, NotFoundError, UsageError
from nekro_client.models import (
    Call,
    CallBody,
    Command,
    CommandBody,
    CommandResponse,
    CommandResult,
    EventType,
    Page,
    Run,
    RunBody,
    RunEventType,
)

__all__ = [
    "router",
    "run_router",
]


run_router = APIRouter(route_class=KeyedRoute, tags=["runs"])

_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The report. As a stream: events `output.chunk` (of a chat's events, live), then one "
        "event `run.ended` with the report, or `problem` with a problem document.",
        "content": {EVENT_STREAM: {"schema": {"type": "string"}}},
    }
}


@run_router.post("/runs", response_model=Run, responses=_ANSWERS)
async def run_code(
    body: RunBody,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    hub: HubDep,
    once: OnceDep,
) -> Response:
    """Run code in a sandbox of a rounds worker, as code of the language model runs, and wait for its end.

    With `Accept: text/event-stream` the output is streamed while the code runs. When the client leaves, the
    run is stopped.
    """
    identity.require(Scope.RUN, chat_key=body.chat_key)
    execution = _Execution(body, services, identity, once)
    async with AsyncExitStack() as closing:
        if not accepts(request, EVENT_STREAM):
            await closing.enter_async_context(execution)
            return await execution.answer_for(request)
        take_stream(request, identity)
        reader = await closing.enter_async_context(hub.live(body.chat_key))
        await closing.enter_async_context(execution)
        refusal = await execution.began()
        if refusal is not None:
            return refusal
        frames = _frames(execution, reader, request)
        return _RunStream(frames, closing.pop_all(), replayed=not execution.begun.is_set())


class _Execution:
    """A run on behalf of one request, which lasts as long as the block at most."""

    task: asyncio.Task[JSONResponse]

    def __init__(self, body: RunBody, services: Services, identity: Identity, once: Once) -> None:
        self._body, self.services, self._identity = body, services, identity
        self._once, self._user_id = once, identity.user_for(body.user_id)
        # A repetition after a crash of the gateway is the same run, which happens once.
        self.id = once.id
        #: Set when nothing refuses the run any more.
        self.begun = asyncio.Event()

    async def __aenter__(self) -> None:
        self.task = asyncio.create_task(self._once.respond(self._work), name="nekro-run")

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self.task)

    async def answer_for(self, request: Request) -> JSONResponse:
        """Wait for the report while the client does.

        Raises:
            ClientDisconnect: the client left.
        """
        left = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({self.task, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        if not self.task.done():
            raise ClientDisconnect
        return self.task.result()

    async def began(self) -> JSONResponse | None:
        """Wait until the run begins or is refused; returns a recorded refusal of the same request.

        Raises:
            NekroError, RefusedError: it is refused.
        """
        begun = asyncio.create_task(self.begun.wait())
        try:
            await asyncio.wait({self.task, begun}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
        if self.begun.is_set():
            return None
        answer = self.task.result()
        return answer if answer.status_code >= HTTPStatus.BAD_REQUEST else None

    async def _work(self) -> Run:
        body, services, identity = self._body, self.services, self._identity
        if body.follow_up:
            identity.require(Scope.POST, chat_key=body.chat_key)
        await begin_paying(services, identity, self.id, body.code)
        await require_rounds_worker(services)
        chat = await services.chat(body.chat_key)
        self.begun.set()
        report = await services.remote_runs.run(
            body.code,
            run_id=self.id,
            chat=chat,
            user_id=self._user_id,
            wakes_agent=body.follow_up,
            timeout_seconds=body.timeout_seconds,
        )
        return run_answer(self.id, report)


class _RunStream(EventStream):
    """A stream that releases what it uses, also if it ends before its first frame."""

    def __init__(
        self, frames: AsyncGenerator[bytes, None], closing: AsyncExitStack, *, replayed: bool
    ) -> None:
        super().__init__(frames, headers=REPLAYED if replayed else None)
        self._closing = closing

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        async with self._closing:
            await super().__call__(scope, receive, send)


async def _frames(execution: _Execution, reader: Reader, request: Request) -> AsyncGenerator[bytes, None]:
    while not execution.task.done():
        woken = asyncio.create_task(reader.wait())
        try:
            await asyncio.wait({execution.task, woken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        for frame in _output(reader, execution.id):
            yield frame
    yield _end_of(execution, request)


def _output(reader: Reader, run_id: str) -> Iterator[bytes]:
    """Remove the live events of a chat from its reader and yield the frames of the run's output."""
    while reader.live:
        item = reader.live.popleft()
        if item.event.call_id == run_id and item.event.type == EventType.OUTPUT_CHUNK:
            yield item.frame


def _end_of(execution: _Execution, request: Request) -> bytes:
    try:
        kind, text = RunEventType.ENDED, bytes(execution.task.result().body).decode()
    except NekroError as exc:
        kind, text = RunEventType.PROBLEM, json_text(problem_of(request, exc))
    return f"event: {kind}\r\ndata: {text}\r\n\r\n".encode()


async def _left(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


router = APIRouter(route_class=KeyedRoute, tags=["calls"])

_LEVELS_OF_ADMINS: Final = ("advanced", "super_user")


@router.post(
    "/calls",
    response_model=Call,
    responses={HTTPStatus.ACCEPTED: {"model": Call, "description": "The call waits for approval."}},
)
async def call_method(
    body: CallBody, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Call a method and wait for its result; the result of an AGENT method starts no round.

    A call that requires approval waits for it, unless the key has the scope `approve`: the answer is 202 with
    `approval_id`, and the result goes to the chat.
    """
    identity.require(Scope.CALL, chat_key=body.chat_key)
    user_id = identity.user_for(body.user_id)
    approver = identity.name if Scope.APPROVE in identity.scopes else None
    method = await services.find_method(body.method)
    # A repetition after a crash is the same call, which has at most one effect.
    call_id = once.id

    given = json.dumps([body.args, body.kwargs])

    async def ask() -> Call:
        await begin_paying(services, identity, call_id, given)
        row = await use_cases.ask_approval(
            services,
            body.method,
            tuple(body.args),
            body.kwargs,
            chat_key=body.chat_key,
            user_id=user_id,
            call_id=call_id,
        )
        return awaiting_call(row, type_=method.type.value)

    async def work() -> Call:
        await begin_paying(services, identity, call_id, given)
        envelope = await use_cases.invoke(
            services,
            body.method,
            tuple(body.args),
            body.kwargs,
            chat_key=body.chat_key,
            user_id=user_id,
            timeout_seconds=body.timeout_seconds,
            call_id=call_id,
            approver=approver,
        )
        value = value_of(envelope, max_bytes=services.settings.sandbox.return_bytes)
        return finished_call(envelope, method=method.task, value=to_json_value(value))

    if method.requires_approval and approver is None:
        return await once.respond(ask, status=HTTPStatus.ACCEPTED)
    return await once.respond(work)


@router.get("/commands")
async def list_commands(services: ServicesDep, identity: IdentityDep) -> Page[Command]:
    """List the commands of the plugins, all on one page."""
    identity.require(Scope.CALL)
    await services.refresh()
    return Page(
        items=[
            Command(
                name=entry.name,
                full_name=entry.full_name,
                aliases=list(entry.aliases),
                permission=entry.permission,
                usage=entry.usage,
                description=entry.description,
            )
            for entry in listed_commands(services.registry)
        ]
    )


@router.post("/commands", response_model=CommandResult)
async def run_command(
    body: CommandBody, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Run a plugin's command, or answer the last one that asked a question in the chat.

    The levels `advanced` and `super_user` need the scope `admin`. A command that fails is a result with the
    status `error`.
    """
    identity.require(Scope.CALL, chat_key=body.chat_key)
    if body.level in _LEVELS_OF_ADMINS:
        identity.require(Scope.ADMIN, chat_key=body.chat_key)
    user_id = identity.user_for(body.user_id) or ""
    who = CommandExecutionContext(
        user_id=user_id,
        username=user_id,
        chat_key=body.chat_key,
        is_super_user=body.level == "super_user",
        is_advanced_user=body.level in _LEVELS_OF_ADMINS,
    )

    call_id = once.id

    async def work() -> CommandResult:
        responses = await use_cases.run_command(
            services, body.line, who=who, timeout_seconds=body.timeout_seconds, call_id=call_id
        )
        files = services.files_of(await services.chat(body.chat_key))

        def show() -> list[CommandResponse]:
            return [_shown(services, body.chat_key, files, response) for response in responses]

        shown = await asyncio.to_thread(show)
        return CommandResult(status=shown[-1].status, responses=shown)

    # A repetition of a command is the same call. An answer has taken its question from the chat.
    return await once.respond(work, is_repeatable=is_command(body.line))


def _shown(services: Services, chat_key: str, files: ChatFiles, response: PluginResponse) -> CommandResponse:
    """Return a response with those of its files that the chat's uploads hold."""
    shown = response.model_dump(mode="json", exclude={"callback_cmd", "on_timeout_message", "context_data"})
    for part in shown["output_segments"] or ():
        path = part.pop("file_path")
        if path is not None:
            with contextlib.suppress(NotFoundError, UsageError):
                file = files.describe(path, name=part["file_name"])
                part["file"] = file_info(services.file_ids, chat_key, file)
    return CommandResponse.model_validate(shown)
