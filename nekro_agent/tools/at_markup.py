"""Mentions in texts of models: the markup ``[@id:123;nickname:Ada@]``."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["neutralize_at_all_markup", "normalize_malformed_at_markup"]

_ID: Final = r"(?P<id>all|[A-Za-z0-9][A-Za-z0-9_.#-]{2,127})"
_NAME: Final = r"(?:\s*[;；,]\s*(?:nickname|name|card)\s*[=:：]\s*(?P<name>[^@\])>】）,\n]{1,200}?))?"
_OPEN: Final = r"[\[【(（]"
_CLOSE: Final = r"\s*(?:[;；]\s*)?(?:@\s*)?[\]】)）]"
#: Parts of a text that never are mentions: code, addresses of pages and of mail.
_PROTECTED: Final = re.compile(
    r"`[^`\n]*`|https?://[^\s<>'\"，。]+|(?<![\w.+-])[\w.+-]+@[\w.-]+\.[A-Za-z]{2,}"
)
_FORMS: Final = tuple(
    re.compile(form, re.IGNORECASE)
    for form in (
        # OneBot's code, with or without its brackets.
        rf"[\[【]\s*CQ\s*:\s*at\s*,\s*qq\s*=\s*{_ID}{_NAME}(?:\s*,[^\[【\]】]*)?[\]】]",
        rf"(?<![\w\[])CQ\s*:\s*at\s*,\s*qq\s*=\s*{_ID}(?![\w.#-])",
        # Our own markup with other brackets or without an at sign, nested or not.
        rf"(?:<\w{{4,12}}\s*\|\s*)?(?:<?At:\s*)?(?:{_OPEN}\s*(?:@\s*)?|@\s*)?{_OPEN}\s*(?:@\s*)?id\s*[=:：]\s*{_ID}{_NAME}"
        rf"{_CLOSE}(?:\s*[)）\]】])?>?",
        rf"(?<![\w\[])@id\s*[=:：]\s*{_ID}{_NAME}\s*@?[\])>】）]?",
        # Discord, and bare numbers.
        r"(?<!\w)<@!?(?P<id>\d{4,20})>",
        rf"(?<![\w/]){_OPEN}\s*@\s*(?P<id>\d{{4,20}}|all)\s*(?:@\s*)?[\]】)）]",
        r"(?<![\w\[/])@\s*(?P<id>\d{5,20})\s*@?(?=$|[\s,，。.!！?？;；:：)\]】>）])",
    )
)
_EVERYONE: Final = re.compile(r"\[@(?:id:)?all(?:;nickname:[^@\]\n]+)?@\]", re.IGNORECASE)
#: What stays of a mention of everyone; the words of the reference.
_EVERYONE_TEXT: Final = "@全体成员"


def normalize_malformed_at_markup(text: str) -> str:
    """Return a text whose mentions have the form ``[@id:123@]``, whatever form the model wrote.

    Code, web addresses and mail addresses are kept.
    """
    pieces: list[str] = []
    end = 0
    for protected in _PROTECTED.finditer(text):
        pieces += [_normalized(text[end : protected.start()]), protected[0]]
        end = protected.end()
    return "".join([*pieces, _normalized(text[end:])])


def neutralize_at_all_markup(text: str) -> str:
    """Return a text whose mentions of everyone are plain words without a notification.

    Other mentions are normalised, as by :func:`normalize_malformed_at_markup`.
    """
    return _EVERYONE.sub(_EVERYONE_TEXT, normalize_malformed_at_markup(text))


def _normalized(text: str) -> str:
    for form in _FORMS:
        text = form.sub(_markup, text)
    return text


def _markup(match: re.Match[str]) -> str:
    name = (match.groupdict().get("name") or "").strip().strip(";；")
    return f"[@id:{match['id']};nickname:{name}@]" if name else f"[@id:{match['id']}@]"
