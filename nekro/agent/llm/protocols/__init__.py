"""The protocols of model endpoints, by the names that settings use."""

from __future__ import annotations

from typing import Final

from nekro.agent.llm.protocols.anthropic import AnthropicProtocol
from nekro.agent.llm.protocols.base import ChatProtocol, Options
from nekro.agent.llm.protocols.gemini import GeminiProtocol
from nekro.agent.llm.protocols.openai import OpenAIProtocol

__all__ = ["PROTOCOLS", "ChatProtocol", "Options"]

_ALL: Final[tuple[ChatProtocol, ...]] = (OpenAIProtocol(), AnthropicProtocol(), GeminiProtocol())
PROTOCOLS: Final = {protocol.name: protocol for protocol in _ALL}
