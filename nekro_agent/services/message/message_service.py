"""Older import path of the message service."""

from __future__ import annotations

from nekro_agent.services.message_service import MessageService, message_service

__all__ = ["MessageService", "message_service"]
