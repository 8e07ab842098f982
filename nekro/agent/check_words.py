"""One-time words in prompts, which show that a model repeats its instructions."""

from __future__ import annotations

import re
import secrets
from typing import Final

__all__ = ["hide_check_words", "new_check_word", "reveals_check_word"]

#: Bytes of entropy of a check word: enough against guessing, short enough for the prompt.
_CHECK_WORD_BYTES: Final = 9
_CHECK_WORD: Final = re.compile(rf"\bcw-[0-9a-f]{{{2 * _CHECK_WORD_BYTES}}}\b", re.IGNORECASE)


def new_check_word() -> str:
    """Return a fresh one-time word for one round's prompt."""
    return "cw-" + secrets.token_hex(_CHECK_WORD_BYTES)


def reveals_check_word(check_word: str, text: str | bytes) -> bool:
    """Whether ``text`` contains the round's one-time word, in any letter case.

    A model that was persuaded to repeat its instructions repeats the word with them, so
    code, output and call arguments that contain it end the run with SECURITY.
    """
    if isinstance(text, bytes):
        return check_word.encode() in text.lower()
    return check_word in text.lower()


def hide_check_words(text: str) -> str:
    """Return a text without one-time words, for records that others read while a round may still run."""
    return _CHECK_WORD.sub("cw-[hidden]", text)
