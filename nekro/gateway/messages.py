"""Receives messages of people from any form in which the API takes them."""

from __future__ import annotations

from http import HTTPStatus

from nekro.app.composition import Services
from nekro.gateway.access.budgets import require_budget
from nekro.gateway.identity import Identity, Scope
from nekro.gateway.parts import message_answer
from nekro.gateway.problems import ProblemError
from nekro_agent.ports import IncomingMessage
from nekro_client.models import PostedMessage

__all__ = ["post_message", "sender_of"]


def sender_of(identity: Identity, stated: str | None) -> str:
    """Return the user in whose name a message is.

    Args:
        stated: the user that the request names; None if it names none.

    Raises:
        ProblemError: 403, the key acts for another user; 422, neither names one.
    """
    user_id = identity.user_for(stated)
    if user_id is None or not user_id.strip():
        raise ProblemError(
            HTTPStatus.UNPROCESSABLE_ENTITY, "user_missing", "name the user with user_id; the key has none"
        )
    return user_id


async def post_message(
    services: Services, identity: Identity, message: IncomingMessage, *, once: str | None
) -> PostedMessage:
    """Record a person's message and start a turn, on the key's budget.

    Args:
        once: names the message (``Once.name``), so that a repetition finds it; None: it has no repetitions.

    Raises:
        ProblemError: 403, 404, the key may not post there; 429, its budget is used up.
        NekroError: the message was not recorded.
    """
    identity.require(Scope.POST, chat_key=message.chat_key)
    await require_budget(services, identity)
    receipt = await services.intake.accept(
        message,
        once_key=None if once is None else f"post:{once}",
        key_id=identity.key_id,
        issuer=identity.name,
    )
    if receipt is None:
        return PostedMessage(message=None, turn_id=None)
    return PostedMessage(
        message=message_answer(receipt.message, services.file_ids, turn_id=receipt.turn_id),
        turn_id=receipt.turn_id,
    )
