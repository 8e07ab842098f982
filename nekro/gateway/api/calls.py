"""Calls of methods, commands of plugins, and runs of code.

A run is carried out by a rounds worker and belongs to its request: it is stopped when the client leaves. Its
answer is the report as JSON, or the output as a stream and then the report.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from nekro.base.tasks import end_tasks
from nekro.gateway.dependencies import HubDep, take_stream
from nekro.gateway.idempotency import REPLAYED, IdempotentRequest, OnceDep
from nekro.gateway.operation_routes import ActorDep, route
from nekro.gateway.problems import problem_of
from nekro.gateway.streams.events import Reader
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.responses import EVENT_STREAM, EventResponse, accepts
from nekro.operations import calls, catalogue
from nekro.operations.actor import Actor, Scope
from nekro.wire.plain_json import json_text
from nekro_agent.errors import NekroError
from nekro_client.models import Call, EventType, Run, RunBody, RunEventType

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
async def run_code(body: RunBody, request: Request, actor: ActorDep, hub: HubDep, once: OnceDep) -> Response:
    """Run code in a sandbox of a rounds worker, as code of the language model runs, and wait for its end.

    With `Accept: text/event-stream` the output is streamed while the code runs. When the client leaves, the
    run is stopped.
    """
    actor.identity.require(Scope.RUN, chat_key=body.chat_key)
    actor.identity.user_for(body.user_id)
    execution = _Execution(actor, body, once)
    async with AsyncExitStack() as closing:
        if not accepts(request, EVENT_STREAM):
            await closing.enter_async_context(execution)
            return await execution.answer_for(request)
        take_stream(request, actor.identity)
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

    def __init__(self, actor: Actor, body: RunBody, once: IdempotentRequest) -> None:
        self._actor, self._body, self._once = actor, body, once
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
        return await calls.run_code(self._actor, self._body, run_id=self.id, on_begun=self.begun.set)


class _RunStream(EventResponse):
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


route(
    router,
    "POST",
    "/calls",
    calls.call_method,
    status_of=lambda call: HTTPStatus.OK if call.approval_id is None else HTTPStatus.ACCEPTED,
    responses={HTTPStatus.ACCEPTED: {"model": Call, "description": "The call waits for approval."}},
)
route(router, "GET", "/commands", catalogue.list_commands)
route(router, "POST", "/commands", calls.run_command)
