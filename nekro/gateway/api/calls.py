"""Calls of methods, and commands of plugins."""

from __future__ import annotations

import asyncio
import contextlib
import json
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Response

from nekro.app.calls.results import value_of
from nekro.app.catalogue.commands import is_command, listed_commands
from nekro.app.chats.files import ChatFiles
from nekro.app.composition import Services
from nekro.base.plain import to_json_value
from nekro.gateway.access.budgets import begin_paying
from nekro.gateway.dependencies import IdentityDep, ServicesDep
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.identity import Scope
from nekro.gateway.parts import file_info
from nekro.gateway.routing import KeyedRoute
from nekro.gateway.views import awaiting_call, finished_call
from nekro_agent.commands.schemas import CommandExecutionContext
from nekro_agent.commands.schemas import CommandResponse as PluginResponse
from nekro_agent.errors import NotFoundError, UsageError
from nekro_client.models import Call, CallBody, Command, CommandBody, CommandResponse, CommandResult, Page

__all__ = ["router"]

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
        row = await services.ask_approval(
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
        envelope = await services.invoke(
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
        return await once.run(ask, status=HTTPStatus.ACCEPTED)
    return await once.run(work)


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
        responses = await services.run_command(
            body.line, who=who, timeout_seconds=body.timeout_seconds, call_id=call_id
        )
        files = services.files_of(await services.chat(body.chat_key))

        def show() -> list[CommandResponse]:
            return [_shown(services, body.chat_key, files, response) for response in responses]

        shown = await asyncio.to_thread(show)
        return CommandResult(status=shown[-1].status, responses=shown)

    # A repetition of a command is the same call. An answer has taken its question from the chat.
    return await once.run(work, is_repeatable=is_command(body.line))


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
