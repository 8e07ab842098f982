"""What the requests of one entry of the ledger used, by model."""

from __future__ import annotations

from dataclasses import replace

from broker_config.model_groups import ModelGroup
from nekro.agent.llm import LLMAnswer, ModelSpent
from nekro.agent.llm.port import cost_of
from storage.access.spendings import ModelUse

__all__ = ["ModelUses", "expected_use", "price_of"]


class ModelUses:
    """Adds up requests to models."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], ModelUse] = {}

    def add(self, spent: ModelSpent) -> None:
        """Count one request."""
        known = self._uses.get((spent.group, spent.model), ModelUse(group=spent.group, model=spent.model))
        self._uses[spent.group, spent.model] = replace(
            known,
            requests=known.requests + 1,
            estimated_requests=known.estimated_requests + spent.is_estimated,
            prompt_tokens=known.prompt_tokens + spent.prompt_tokens,
            completion_tokens=known.completion_tokens + spent.answer_tokens,
            cost=known.cost + spent.cost,
        )

    def complete(self, llm: LLMAnswer) -> None:
        """Add the figures of an answer whose client did not report its requests."""
        if not self._uses:
            self._uses[llm.group, llm.model] = ModelUse(
                group=llm.group,
                model=llm.model,
                requests=llm.tries,
                estimated_requests=int(llm.is_estimated),
                prompt_tokens=llm.prompt_tokens or 0,
                completion_tokens=llm.answer_tokens or 0,
                cost=llm.cost,
            )

    @property
    def all(self) -> list[ModelUse]:
        """Each model once."""
        return list(self._uses.values())


def expected_use(group: ModelGroup, *, prompt_tokens: int, answer_tokens: int) -> ModelUse:
    """Return what one request that is about to be sent is expected to use."""
    return ModelUse(
        group=group.name,
        model=group.model,
        estimated_requests=1,
        prompt_tokens=prompt_tokens,
        completion_tokens=answer_tokens,
        cost=price_of(group, prompt_tokens, answer_tokens),
    )


def price_of(group: ModelGroup, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0) -> float:
    """Return what tokens of a model group cost; ``cached_tokens`` are a part of the prompt."""
    return cost_of(
        prompt_tokens,
        answer_tokens,
        cached_tokens,
        input_price=group.input_price,
        output_price=group.output_price,
        cached_input_price=group.cached_input_price,
    )
