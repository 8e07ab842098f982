"""Tokens of texts, and how a prompt's parts share those of a model's context."""

from nekro.agent.tokens.contexts import ModelContexts
from nekro.agent.tokens.counter import ESTIMATE, TokenCounter, counter_of
from nekro.agent.tokens.cutting import cut_text
from nekro.agent.tokens.limits import Limits, PromptRoom

__all__ = ["ESTIMATE", "Limits", "ModelContexts", "PromptRoom", "TokenCounter", "counter_of", "cut_text"]
