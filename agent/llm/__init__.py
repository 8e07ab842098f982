"""The port to a language model and its two clients: an OpenAI-compatible endpoint, and a script."""

from agent.llm.factory import create_client
from agent.llm.openai_client import OpenAIClient
from agent.llm.port import LLMAnswer, LLMClient, LLMRequest
from agent.llm.scripted_client import ScriptedAnswer, ScriptedClient

__all__ = [
    "LLMAnswer",
    "LLMClient",
    "LLMRequest",
    "OpenAIClient",
    "ScriptedAnswer",
    "ScriptedClient",
    "create_client",
]
