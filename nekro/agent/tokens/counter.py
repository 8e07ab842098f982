"""Counts tokens: with a model's own tokenizer where it is at hand, else by an estimate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Final

from loguru import logger

from nekro.agent.tokens.estimate import estimate_tokens
from nekro.agent.tokens.tables import encoding_of, load_encoder

__all__ = ["ESTIMATE", "TokenCounter", "counter_of"]

#: Texts whose count is kept, about those of a few prompts. A tokenizer takes 0.2 µs per character or more.
_MOST_KEPT: Final = 1024
_LONGEST_KEPT: Final = 32_768


class TokenCounter:
    """Counts the tokens of texts; thread-safe.

    Args:
        name: the tokenizer, for logs; ``estimate`` if ``is_exact`` is False.
        is_exact: whether ``count`` is a tokenizer, which takes so long that prompts are built on a thread.
    """

    def __init__(self, name: str, count: Callable[[str], int], *, is_exact: bool) -> None:
        self.name = name
        self.is_exact = is_exact
        self._count = count
        # In a turn most texts of a prompt are those of the prompt before.
        self._kept = lru_cache(maxsize=_MOST_KEPT)(count)

    def count(self, text: str) -> int:
        """Return the tokens of a text."""
        return self._kept(text) if len(text) <= _LONGEST_KEPT else self._count(text)


#: Counts for a model whose tokenizer is not known.
ESTIMATE: Final = TokenCounter("estimate", estimate_tokens, is_exact=False)


def counter_of(model: str) -> TokenCounter:
    """Return the counter of a model's texts; the first call for a tokenizer reads its table, which blocks.

    Never opens a connection: without the extra ``tokens``, or without the tokenizer's table in
    ``TIKTOKEN_CACHE_DIR``, it is ``ESTIMATE``.
    """
    encoding = encoding_of(model)
    return ESTIMATE if encoding is None else _exact(encoding)


@cache
def _exact(encoding: str) -> TokenCounter:
    encode = load_encoder(encoding)
    if encode is None:
        return ESTIMATE
    logger.bind(encoding=encoding).debug("tokenizer_loaded")
    return TokenCounter(encoding, lambda text: len(encode(text)), is_exact=True)
