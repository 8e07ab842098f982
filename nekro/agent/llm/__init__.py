"""The port to a language model, and the client that replays a script.

The client for endpoints is in ``nekro.agent.llm.endpoint_client``; ``create_client`` imports it when
needed.
"""

from nekro.agent.llm.clients import create_client, create_models
from nekro.agent.llm.port import FailedGroup, LLMAnswer, LLMClient, LLMRequest, MissingClient, ModelSpent
from nekro.agent.llm.scripted_client import ScriptedAnswer, ScriptedClient

__all__ = [
    "FailedGroup",
    "LLMAnswer",
    "LLMClient",
    "LLMRequest",
    "MissingClient",
    "ModelSpent",
    "ScriptedAnswer",
    "ScriptedClient",
    "create_client",
    "create_models",
]
