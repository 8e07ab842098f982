"""Checks the variables that a program leaves for the turn's next one.

The sandbox sends ``[[names that are not kept],{name: text, …}]``, where a text is the tagged text of one
value. All of it is hostile. The parser of arguments reads each value within one budget for all, so
``$pickle`` and whatever else has no plain form is refused here; the values themselves are dropped, and the
next sandbox builds them again from the texts.

"""

from __future__ import annotations

import asyncio
import builtins
import keyword
import unicodedata
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from loguru import logger

from nekro.sandbox.models import KeptVariables, StubMethod
from nekro.wire.budget import DecodeBudget, DecodeMeter
from nekro.wire.parser import load_in_slices
from nekro.wire.values import arguments_in_slices, arguments_text
from nekro_agent.errors import ArgumentError
from nekro_agent.methods import OWN_NAMES

__all__ = ["MOST_VARIABLES", "frame_bytes", "is_variable", "read_kept", "reserved_names"]

#: Variables that one program may leave, and names of others that are shown.
MOST_VARIABLES: Final = 100
_MOST_NAME_CHARS: Final = 64
#: Room in the frame for names, in UTF-8 with their quotes.
_NAMES_BYTES: Final = 2 * MOST_VARIABLES * (4 * _MOST_NAME_CHARS + 8)
_BUILT_IN: Final = frozenset(dir(builtins))
_LEAST_STEPS: Final = DecodeBudget().steps


def frame_bytes(keep_bytes: int) -> int:
    """Return the largest payload of a KEEP frame for so many bytes of texts; 0 for 0."""
    # Within the frame, quotes and backslashes of a text are escaped.
    return 2 * keep_bytes + _NAMES_BYTES if keep_bytes else 0


def is_variable(name: object) -> bool:
    """Whether a value is a name that a variable to keep may have, as the compiler writes it."""
    return (
        type(name) is str
        and 0 < len(name) <= _MOST_NAME_CHARS
        and name.isidentifier()
        and not name.startswith("_")
        and not keyword.iskeyword(name)
        and unicodedata.normalize("NFKC", name) == name
    )


def reserved_names(methods: Iterable[StubMethod]) -> frozenset[str]:
    """Return the names that a kept variable would hide: the built-in ones, and those of a run's methods."""
    own = {name for method in methods for name in (method.name, method.path.partition(".")[0]) if name}
    return _BUILT_IN | OWN_NAMES | own


async def read_kept(payload: bytes, *, reserved: frozenset[str], most_bytes: int) -> KeptVariables:
    """Check what a sandbox sent; what does not pass is not kept.

    Yields to the event loop after each slice of work.

    Args:
        reserved: names that no variable may have.
        most_bytes: of all texts together.
    """
    meter = DecodeMeter(DecodeBudget(steps=max(_LEAST_STEPS, most_bytes)))
    try:
        names, texts = await _parts(payload)
    except ArgumentError as exc:
        logger.bind(error=str(exc)).warning("sandbox_variables_refused")
        return KeptVariables()
    kept: dict[str, str] = {}
    # The runner sends no more of both: what comes after them is not looked at.
    left_out = [name for name in names[:MOST_VARIABLES] if is_variable(name)]
    left = most_bytes
    for name, text in islice(texts.items(), MOST_VARIABLES):
        if not is_variable(name) or type(text) is not str:
            continue  # no runner of ours sends that
        size = len(text.encode("utf-8", "surrogatepass"))
        if name in reserved or size > left or not await _is_plain(text, meter):
            left_out.append(name)
            continue
        kept[name] = text
        left -= size
    return KeptVariables(values=kept, not_kept=tuple(dict.fromkeys(left_out))[:MOST_VARIABLES])


async def _parts(payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read the frame.

    Raises:
        ArgumentError: it is not in the form that the module describes.
    """
    slices = arguments_in_slices(payload, max_bytes=len(payload))
    while True:
        try:
            next(slices)
        except StopIteration as end:
            parts: tuple[tuple[Any, ...], dict[str, Any]] = end.value
            return parts
        await asyncio.sleep(0)


async def _is_plain(text: str, meter: DecodeMeter) -> bool:
    """Whether a text is the tagged text of one plain value, which costs no more than is left."""
    try:
        slices = load_in_slices(arguments_text(text.encode()), meter)
        while True:
            try:
                next(slices)
            except StopIteration:
                return True
            await asyncio.sleep(0)
    except (ArgumentError, UnicodeEncodeError):
        return False
