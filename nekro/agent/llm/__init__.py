"""The port to a language model. Its clients are in ``clients``, which few processes import."""

from nekro.agent.llm.port import FailedGroup, LLMAnswer, LLMClient, LLMRequest, MissingClient, ModelSpent

__all__ = [
    "FailedGroup",
    "LLMAnswer",
    "LLMClient",
    "LLMRequest",
    "MissingClient",
    "ModelSpent",
]
