"""Chats whose messages a gateway sends to a client of an adapter."""

from __future__ import annotations

from typing import Final

from nekro_agent.layout import channel_of
from nekro_agent.ports import MessageKind
from storage.repositories.messages import Message
from storage.transaction import Transaction

__all__ = ["SSE_ADAPTER", "queue_send"]

#: Nekro Agent's adapter for programs that connect over Server-Sent Events; chats are ``sse-<channel id>``.
SSE_ADAPTER: Final = "sse"


async def queue_send(transaction: Transaction, row: Message) -> None:
    """Let clients receive a new message, if the agent sends it to a chat of such an adapter."""
    if row.kind is not MessageKind.ASSISTANT or not row.chat_key.startswith(f"{SSE_ADAPTER}-"):
        return
    channel_id = channel_of(row.chat_key).channel_id
    if channel_id:
        await transaction.adapters.add_message(row.id, adapter_key=SSE_ADAPTER, channel_id=channel_id)
