"""Cuts texts in the middle to a number of tokens."""

from __future__ import annotations

from typing import Final

from nekro.agent.text import neutralise
from nekro.agent.tokens.counter import TokenCounter

__all__ = ["LEAST_TOKENS", "cut_text"]

#: Least limit that a text is cut to: the note in the gap takes about as much.
LEAST_TOKENS: Final = 40
#: So many characters of a text are looked at for each token of a limit, so that the work does not grow with
#: the text. Only long runs of one character have more of them in a token.
_CHARS_PER_TOKEN: Final = 16
_MOST_STEPS: Final = 5


def cut_text(text: str, limit: int, counter: TokenCounter, *, handle: str | None = None) -> str:
    """Return foreign text for a prompt: made safe, and of about ``limit`` tokens at most.

    Of a longer one both ends are shown, because the beginning identifies a text and the end shows its
    outcome. The gap states what is hidden.

    Args:
        limit: tokens; less than ``LEAST_TOKENS`` counts as that.
        handle: by which `read_rest` finds the text; None: the gap names none.
    """
    limit = max(limit, LEAST_TOKENS)
    window = limit * _CHARS_PER_TOKEN
    if len(text) <= window and counter.count(text) <= limit:
        return neutralise(text)
    room = limit - LEAST_TOKENS // 2
    head = _fitting(text[:window], room * 2 // 3, counter)
    # Reversed, so that the end of the text stays.
    tail = _fitting(text[-window:][::-1], room - room * 2 // 3, counter)
    hidden = len(text) - head - tail
    if hidden <= 0:
        return neutralise(text)
    return f"{neutralise(text[:head])}{_gap(hidden, head, handle)}{neutralise(text[len(text) - tail :])}"


def _fitting(text: str, limit: int, counter: TokenCounter) -> int:
    """Return how many characters of the beginning of a text have about ``limit`` tokens at most."""
    length = min(len(text), limit * 4)
    for _ in range(_MOST_STEPS):
        tokens = counter.count(text[:length])
        if tokens <= limit and (length == len(text) or tokens > limit * 9 // 10):
            return length
        length = min(len(text), max(1, length * limit * 19 // 20 // max(tokens, 1)))
    while length > 1 and counter.count(text[:length]) > limit:
        length = length * 3 // 4
    return length


def _gap(hidden: int, start: int, handle: str | None) -> str:
    if handle is None:
        return f"\n[… {hidden} characters hidden …]\n"
    return f'\n[… {hidden} characters hidden; read_rest("{handle}", {start}) returns them …]\n'
