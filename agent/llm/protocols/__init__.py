"""The protocols of model endpoints, by the names that settings use."""

from __future__ import annotations

from typing import Final

from agent.llm.protocols.anthropic import AnthropicProtocol
from agent.llm.protocols.base import ChatProtocol, Options
from agent.llm.protocols.gemini import GeminiProtocol
from agent.llm.protocols.openai import OpenAIProtocol

__all__ = ["PROTOCOLS", "ChatProtocol", "Options"]

_ALL: Final[tuple[ChatProtocol, ...]] = (OpenAIProtocol(), AnthropicProtocol(), GeminiProtocol())
PROTOCOLS: Final = {protocol.name: protocol for protocol in _ALL}
