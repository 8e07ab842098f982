"""Removes secrets and host paths from texts that leave the host."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import quote

__all__ = ["Redactor"]

#: Shorter values are too common in ordinary text to be replaced.
MIN_SECRET_CHARS: Final = 4
#: The password in ``scheme://user:password@host``. Without the scheme, so that a search has one start per
#: ``://``: texts come from sandboxes and requests.
_URL_PASSWORD: Final = re.compile(r"(?P<head>://[^\s:/@]*:)[^\s/@]+(?=@)")


class Redactor:
    """Replaces secrets, URL passwords and host paths in a text.

    Args:
        secrets: values that must not appear, either plain or percent-encoded.
        host_paths: directories whose names reveal something about the host; of a path below one
            only the tail is kept (``/srv/nekro/data/a.txt`` becomes ``[host]/a.txt``).
    """

    def __init__(self, secrets: Iterable[str] = (), host_paths: Iterable[Path | str] = ()) -> None:
        replacements: dict[str, str] = {}
        for path in host_paths:
            text = str(path).rstrip("/")
            if text:
                replacements[text] = "[host]"
        for secret in secrets:
            if len(secret) >= MIN_SECRET_CHARS:
                replacements[secret] = replacements[quote(secret, safe="")] = "[secret]"
        self._replacements = replacements
        # Longest first: a secret that contains another one must be replaced as a whole.
        ordered = sorted(replacements, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def __call__(self, text: str) -> str:
        """Return ``text`` with everything sensitive replaced."""
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: self._replacements[match[0]], text)
        return _URL_PASSWORD.sub(r"\g<head>[secret]", text)
