"""What commands and the gateway ask of the system alike: calls, code, command lines, messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loguru import logger

from nekro.app.calls.dispatch import CallScope
from nekro.app.chats.attachments import segments_of_message
from nekro.plugins.entry_registry import refuse_unfit
from nekro.wire.invocation import Envelope, new_id
from nekro.wire.values import encode_arguments
from nekro_agent.ports import IncomingMessage

if TYPE_CHECKING:
    from nekro.app.chats.attachments import Attachment
    from nekro.app.rounds.runs import CodeReport
    from nekro.app.rounds.stop import StoppedRounds
    from nekro.app.services import Services
    from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponse
    from storage.accounts.approvals import Approval

__all__ = ["ask_approval", "invoke", "receive_message", "reset_chat", "run_code", "run_command"]


async def invoke(
    services: Services,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    chat_key: str,
    user_id: str | None,
    timeout_seconds: float | None,
    call_id: str | None = None,
    approver: str | None = None,
) -> Envelope:
    """Call one method through the queue, as the command line does; requests no follow-up round.

    Args:
        method: function name or ``author.module.function``.
        call_id: a call other than of type TOOL has at most one effect per id; None makes a new one.
        timeout_seconds: None means the limit of the method's lane.
        approver: who approves the call by making it, if it requires approval, such as ``shell:ada``.
            None: not approved; ``ask_approval`` lets such a call wait.

    Raises:
        MethodNotFoundError, MethodDisabledError, ArgumentError, MethodFailedError, NotApprovedError,
            CallTimeoutError, BrokerUnavailableError: as their names say.
    """
    entry = await services.find_method(method)
    refuse_unfit(entry, len(args), kwargs)
    chat = await services.chat(chat_key)
    return await services.dispatcher.invoke_once(
        entry,
        encode_arguments(args, kwargs),
        chat=chat,
        user_id=user_id,
        timeout_seconds=timeout_seconds,
        call_id=call_id,
        approver=approver,
    )


async def ask_approval(
    services: Services,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    chat_key: str,
    user_id: str | None,
    call_id: str | None = None,
) -> Approval:
    """Request approval of one call; if it is approved it runs, and its result goes to the chat.

    Args:
        method: function name or ``author.module.function``.
        call_id: of a call with this id approval is requested once; None makes a new one.

    Raises:
        MethodNotFoundError, MethodDisabledError, ArgumentError, StorageUnavailableError,
            OutcomeUnknownError: as their names say.
    """
    entry = await services.find_method(method)
    refuse_unfit(entry, len(args), kwargs)
    chat = await services.chat(chat_key)
    call_id = call_id or new_id()
    scope = CallScope(chat=chat, user_id=user_id, wakes_agent=False, account_id=call_id)
    arguments, lane = encode_arguments(args, kwargs), services.dispatcher.lane_of(entry)
    invocation = services.dispatcher.awaiting(entry, arguments, scope, call_id=call_id, lane=lane)
    return await services.approval_requests.ask(entry, invocation, lane=lane)


async def run_code(
    services: Services, code: str, *, chat_key: str, user_id: str | None, follow_up: bool, file_name: str
) -> CodeReport:
    """Run code in a sandbox, like code of the model.

    Args:
        follow_up: whether an AGENT result requests a round.
        file_name: name of the code's file, for the log.

    Raises:
        SandboxUnavailableError, SandboxError: the code did not run.
    """
    chat = await services.chat(chat_key)
    logger.bind(chat_key=chat_key, file=file_name).debug("code_run")
    return await services.runs.run(code, chat=chat, user_id=user_id, wakes_agent=follow_up)


async def run_command(
    services: Services,
    line: str,
    *,
    who: CommandExecutionContext,
    timeout_seconds: float | None,
    call_id: str | None = None,
) -> list[CommandResponse]:
    """Run a plugin's command on a worker, or answer the open question of one.

    Args:
        timeout_seconds: None means the limit of calls.
        call_id: see ``CommandSender.run``.

    Raises:
        InvalidValueError: the line is an answer, but no question is open.
        CallTimeoutError, BrokerUnavailableError, OutcomeUnknownError: as their names say.
    """
    return await services.command_sender.run(
        line,
        chat=await services.chat(who.chat_key),
        who=who,
        timeout_seconds=timeout_seconds or services.settings.workers.call_timeout_seconds,
        call_id=call_id,
    )


async def receive_message(
    services: Services,
    chat_key: str,
    text: str,
    *,
    user_id: str,
    user_name: str,
    is_tome: bool = True,
    adapter_key: str | None = None,
    channel_id: str | None = None,
    channel_type: str | None = None,
    channel_name: str | None = None,
    files: Sequence[Attachment] = (),
) -> str | None:
    """Run hooks on a person's message, record it, request a round; returns its id, None if blocked.

    For the arguments see ``nekro_agent.ports.IncomingMessage``.

    Args:
        files: pictures and files of the message, which ``files_of(chat).add`` has stored.
    """
    return await services.intake.receive(
        IncomingMessage(
            chat_key=chat_key,
            text=text,
            user_id=user_id,
            user_name=user_name,
            is_tome=is_tome,
            adapter_key=adapter_key,
            channel_id=channel_id,
            channel_type=channel_type,
            channel_name=channel_name,
            content_data=segments_of_message(text, files),
        )
    )


async def reset_chat(services: Services, chat_key: str) -> StoppedRounds:
    """Start a new conversation: stop rounds, run reset hooks, hide the history from the model."""
    return await services.intake.reset(await services.chat(chat_key))
