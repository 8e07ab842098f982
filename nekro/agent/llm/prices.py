"""What tokens cost: the one formula of all model requests."""

from __future__ import annotations

__all__ = ["cost_of"]


def cost_of(
    prompt_tokens: int,
    answer_tokens: int,
    cached_tokens: int = 0,
    *,
    input_price: float,
    output_price: float,
    cached_input_price: float | None = None,
) -> float:
    """Return the cost of a request, in the currency of the prices.

    Args:
        cached_tokens: a part of the prompt; more than it, and less than 0, are not counted.
        input_price: of a million tokens, as the other prices.
        cached_input_price: None means ``input_price``.
    """
    if cached_input_price is None:
        cached_input_price = input_price
    cached = min(max(cached_tokens, 0), prompt_tokens)
    prompt = (prompt_tokens - cached) * input_price + cached * cached_input_price
    return (prompt + answer_tokens * output_price) / 1_000_000
