"""Finds literal secrets in declarations, so that listings, logs and errors do not show them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from nekro.base.redaction import Redactor
from nekro.extensions.mcp.client.declarations import Declaration, referenced, without_references

__all__ = ["MASK", "literal_secrets", "redactor_of", "shown"]

MASK: Final = "[secret]"
_SECRET_KEY: Final = re.compile(
    r"token|secret|passw|pwd|api[-_]?key|access[-_]?key|credential|authorization|auth$|private|signature|session|"
    r"cookie|bearer|(^|[-_])key$|(^|[-_])pat$|dsn$",
    re.IGNORECASE,
)
#: Beginnings of keys of common services.
_KNOWN: Final = re.compile(
    r"(sk-|pk-|rk_|ghp_|gho_|ghs_|ghu_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|eyJ|nk_|hf_|npm_|pypi-|ya29\.)"
    r"[A-Za-z0-9_\-./+=]{8,}"
)
_WORD: Final = re.compile(r"[A-Za-z0-9_\-+=]{20,}")
#: Shorter values of references are words that other texts contain too.
_LEAST_CHARS: Final = 6
_LEAST_ENTROPY_BITS: Final = 3.5
_SCHEMES: Final = re.compile(r"(?i)^(bearer|basic|token|digest)\s+")


def shown(declaration: Declaration) -> dict[str, Any]:
    """Return a declaration as listings show it: each literal that looks like a secret is masked."""
    found = literal_secrets(declaration)
    hide = Redactor(found.values())
    plain = declaration.model_dump(mode="json", exclude_defaults=True)
    for where, literal in found.items():  # also those that are too short for a redactor
        group, _, key = where.partition(".")
        if group in ("env", "headers"):
            plain[group][key] = plain[group][key].replace(literal, MASK)
    return {key: _hidden(value, hide) for key, value in plain.items()}


def redactor_of(declaration: Declaration) -> Redactor:
    """Return the redactor of texts about a server: it knows literal secrets and the values of references."""
    values = [value for text in declaration.texts() for value in referenced(text)]
    literals = literal_secrets(declaration).values()
    words = [word for literal in literals for word in _secret_words(literal)]
    return Redactor([*literals, *words, *(value for value in values if len(value) >= _LEAST_CHARS)])


def literal_secrets(declaration: Declaration) -> dict[str, str]:
    """Return the literal texts that look like secrets, by where they are, for example ``env.API_KEY``."""
    return dict(_found(declaration))


def _found(declaration: Declaration) -> Iterator[tuple[str, str]]:
    yield from _of_mapping("env", declaration.env)
    yield from _of_mapping("headers", declaration.headers)
    yield from _of_arguments(declaration.args)
    if declaration.url is not None:
        yield from _of_url(declaration.url)
    if declaration.nekro.oauth is not None:
        yield from _of_mapping("nekro.oauth", {"client_secret": declaration.nekro.oauth.client_secret})


def _of_mapping(where: str, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        literal = _SCHEMES.sub("", without_references(value)).strip()
        if literal and (_SECRET_KEY.search(key) or _looks_secret(literal)):
            yield f"{where}.{key}", literal


def _of_arguments(args: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for index, arg in enumerate(args):
        option, has_value, value = arg.partition("=")
        is_named = arg.startswith("-")
        literal = without_references(value if is_named and has_value else arg).strip()
        before = args[index - 1] if index else ""
        names_secret = (is_named and has_value and _SECRET_KEY.search(option)) or (
            before.startswith("-") and "=" not in before and not is_named and _SECRET_KEY.search(before)
        )
        if literal and (names_secret or _looks_secret(literal)):
            yield f"args[{index}]", literal


def _of_url(url: str) -> Iterator[tuple[str, str]]:
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return
    if password and without_references(password):
        yield "url (password)", password
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if value and without_references(value) and (_SECRET_KEY.search(key) or _looks_secret(value)):
            yield f"url ({key})", value
    for part in parts.path.split("/"):
        if _looks_secret(without_references(part)):
            yield "url (path)", part


def _looks_secret(text: str) -> bool:
    return bool(_secret_words(text))


def _secret_words(text: str) -> list[str]:
    """Return the parts of a text that look like keys; those of paths, versions and packages are words."""
    known = [match[0] for match in _KNOWN.finditer(text)]
    return [*known, *(word for word in _WORD.findall(text) if _is_random(word))]


def _is_random(word: str) -> bool:
    kinds = (any(c.isdigit() for c in word), any(c.islower() for c in word), any(c.isupper() for c in word))
    if sum(kinds) < 2 or not kinds[0]:
        return False
    counts = Counter(word)
    bits = -sum(count / len(word) * math.log2(count / len(word)) for count in counts.values())
    return bits >= _LEAST_ENTROPY_BITS


def _hidden(value: Any, hide: Redactor) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {key: _hidden(item, hide) for key, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item, hide) for item in value]
    return value
