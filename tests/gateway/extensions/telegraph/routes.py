"""Its routes: ``POST /telegraph/{office}`` takes a message, ``GET`` returns what the agent sent."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, HTTPException, Request

from nekro.gateway.dependencies import ServicesDep
from nekro.gateway.document.examples import JSON, Examples
from nekro.gateway.extensions import GatewayPart, Running, running
from nekro_agent.ports import IncomingMessage

from .settings import TelegraphSettings

__all__ = ["GATEWAY_PART", "Office"]

ADAPTER: Final = "telegraph"
CLIENT: Final = "operator"

router = APIRouter(tags=["telegraph"])


class Office(Running):
    """What runs in the gateway; it counts what it took."""

    taken = 0
    is_open = False

    def start(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False


@router.post("/telegraph/{office}")
async def take(office: str, text: str, request: Request, services: ServicesDep, key: str = "") -> int:
    """Receive a message of a person."""
    settings = services.settings.of_extension(ADAPTER, TelegraphSettings)
    if settings.key is not None and key != settings.key.get_secret_value():
        raise HTTPException(401, "wrong key")
    if len(text.split()) > settings.max_words:
        raise HTTPException(422, f"more than {settings.max_words} words")
    message = IncomingMessage(chat_key=f"{ADAPTER}-{office}", text=text, user_id="ada", user_name="Ada")
    await services.intake.accept(message, once_key=None, issuer=ADAPTER)
    running(request, Office).taken += 1
    return running(request, Office).taken


@router.get("/telegraph/{office}")
async def fetch(office: str, services: ServicesDep) -> list[str]:
    """Send what the agent wrote."""
    async with services.database.begin() as transaction:
        known = await transaction.adapters.find(CLIENT, adapter_key=ADAPTER)
        if known is None:
            await transaction.adapters.register(
                CLIENT, adapter_key=ADAPTER, platform="wire", name="operator", version="1"
            )
        await transaction.adapters.subscribe(CLIENT, [office])
        fence = await transaction.adapters.connect(CLIENT, owner=services.node, lease_seconds=60)
        due = await transaction.adapters.take_due(
            CLIENT, fence, adapter_key=ADAPTER, answer_seconds=60, limit=10
        )
        for send in due:
            await transaction.adapters.confirm(send.id, client_id=CLIENT, answer={})
        found = [await transaction.messages.find(send.message_id) for send in due if send.message_id]
    return [message.text for message in found if message is not None]


GATEWAY_PART: Final = GatewayPart(
    root=(router,),
    build=lambda _services, _hub: Office(),
    examples=Examples(
        parameters={"office": "berlin"}, operations={"fetch": {"answer": {JSON: ["It rains in Berlin"]}}}
    ),
)
