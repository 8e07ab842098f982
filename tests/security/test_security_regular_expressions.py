"""No regular expression of the product takes quadratic time: most of them read texts of others."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
import time
from collections.abc import Iterable, Iterator
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from waiting import cpu_limit

from nekro.agent.answers.notations import WRAPPED

pytestmark = [pytest.mark.extended, pytest.mark.one_python]

PACKAGES = ("broker_config", "nekro", "nekro_agent", "nekro_client", "plugin_pkgs", "storage", "workers")
#: What texts are made of, besides the characters of an expression.
PIECES = ("a", "0", " ", "\n", ".", "-", "\\", "[", "(", "<", '"', "'", "`", "@", ":", "/", "=", "{", "\x1b")
#: Lengths of texts: to find the slowest ones for an expression, and to try these.
SHORT, LONG = 400, 60_000
#: Expressions that meet short texts only, with what makes them short.
SHORT_TEXTS = {
    "nekro.agent.answers.extraction.CODE_END": "its caller takes the end of a line, or matches a whole one",
    "nekro.agent.answers.live_words._PARTIAL": "its caller searches the last 320 characters",
    "nekro.agent.answers.replies._CALL": "its caller cuts lines to 300 characters",
    "nekro.agent.answers.replies._IMPORT": "its caller cuts lines to 300 characters",
    "broker_config.model_groups._VARIABLE": "names of environment variables, which the operator sets",
    "nekro_agent.tools.message_id._REPLY_CODE": "its caller takes at most 1,000 characters",
    "nekro.gateway.document.openapi._FIELD": "reads our own source",
    "nekro_agent.downloads.part._PART_NAME": "names of files, which the file system limits",
}
#: Expressions that are matched from the beginning of a text only.
FROM_THE_BEGINNING = {
    "nekro.agent.answers.extraction.HEADED",
    "nekro.agent.answers.extraction.NAKED_HARMONY",
    "nekro.agent.answers.extraction._OPENS",
    "nekro.cli.plugin_files._KEY",
    "nekro_agent.downloads.addresses._COOKIE",
    "nekro_agent.files.names._EXTENDED",
    "nekro.sandbox.limits.proc_files._MAPPING",
    "storage.files.scan._UNFINISHED",
}
#: Of the slowest texts of one expression: milliseconds if the time grows with the length, else 1.8 s or more.
CPU_SECONDS = 1.0
#: Code in sandboxes, and modules that do something when they are imported.
NOT_IMPORTED = ("nekro.sandbox.guest", "storage.migrations")


def modules(package: str) -> Iterator[str]:
    """Names of a package's modules."""
    yield package
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.startswith(NOT_IMPORTED) and not module.name.endswith("__main__"):
            yield module.name


def patterns(value: object) -> Iterator[re.Pattern[Any]]:
    """The expressions in a value of a module."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(patterns, value.values()))
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(patterns, value))


def expressions() -> dict[tuple[Any, int], tuple[str, re.Pattern[Any]]]:
    """The expressions of all modules, with the place of one of their uses."""
    found: dict[tuple[Any, int], tuple[str, re.Pattern[Any]]] = {}
    for name in itertools.chain.from_iterable(map(modules, PACKAGES)):
        for attribute, value in vars(importlib.import_module(name)).items():
            for pattern in patterns(value):
                found.setdefault((pattern.pattern, pattern.flags), (f"{name}.{attribute}", pattern))
    return found


def texts(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str]]:
    """Beginnings and repeated parts of texts that an expression may take long for."""
    own = pattern.pattern.decode("latin-1") if isinstance(pattern.pattern, bytes) else pattern.pattern
    pieces = list(dict.fromkeys([*PIECES, *(char for char in own if char.isprintable())]))
    yield from itertools.product(("", *pieces), pieces)
    yield from (
        ("", word) for word in dict.fromkeys(words(_parser.parse(pattern.pattern, pattern.flags & ~re.U)))
    )
    yield from (("", "".join(pair)) for pair in itertools.permutations(pieces, 2))


def words(parts: Iterable[tuple[Any, Any]], before: str = "") -> Iterator[str]:
    """Texts that beginnings of an expression match: repeated, each is a place where a search begins.

    Args:
        parts: as Python's parser of expressions returns them.
        before: what the parts before them match.
    """
    for kind, value in parts:
        match str(kind):
            case "LITERAL":
                before += chr(value)
            case "IN":
                before += next(
                    (chr(_first(one)) for one in value if str(one[0]) in ("LITERAL", "RANGE")), "a"
                )
            case "SUBPATTERN":
                *_, before = (before, *words(value[3], before))
            case "BRANCH":
                *_, before = (before, *(word for part in value[1] for word in words(part, before)))
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                for _ in range(max(1, min(value[0], 4))):
                    inside = list(words(value[2], before))
                    yield from inside
                    before = inside[-1] if value[0] and inside else before
        if before:
            yield before


def _first(part: tuple[Any, Any]) -> int:
    return int(part[1] if isinstance(part[1], int) else part[1][0])


def seconds(pattern: re.Pattern[Any], text: str, *, searches: bool) -> float:
    """Processor time of a match of the whole text and, if asked for, of a search; else of a match."""
    tried = text.encode("latin-1", "replace") if isinstance(pattern.pattern, bytes) else text
    begin = time.thread_time()
    pattern.fullmatch(tried)
    (pattern.search if searches else pattern.match)(tried)
    return time.thread_time() - begin


def grown(text: tuple[str, str], length: int) -> str:
    """A text of about that length."""
    begin, part = text
    return begin + part * (length // len(part)) + "\x00"


def test_no_expression_takes_quadratic_time() -> None:
    found = expressions()
    assert len(found) > 80
    places = {place for place, _ in found.values()}
    assert SHORT_TEXTS.keys() | FROM_THE_BEGINNING <= places, "an exemption without an expression"
    for place, pattern in found.values():
        if place in SHORT_TEXTS:
            continue
        slow, searches = list(texts(pattern)), place not in FROM_THE_BEGINNING
        for length, kept in ((SHORT, 40), (10 * SHORT, 3)):
            slow = sorted(slow, key=lambda text: seconds(pattern, grown(text, length), searches=searches))[
                -kept:
            ]
        for text in slow:
            print(place, text)  # shown if the limit is reached
            with cpu_limit(CPU_SECONDS):
                seconds(pattern, grown(text, LONG), searches=searches)


@pytest.mark.parametrize("piece", [" ", "\n", "</answer>", "</answer> ", "<"])
def test_a_wrapped_answer_is_matched_as_a_whole_in_linear_time(piece: str) -> None:
    with cpu_limit(CPU_SECONDS):
        assert WRAPPED.fullmatch("<answer>" + piece * 60_000 + "x") is not None
