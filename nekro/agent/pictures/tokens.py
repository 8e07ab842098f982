"""Estimates the tokens of images."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["LOW_SIDE", "MOST_TOKENS", "tokens_of_image"]

#: Longest side in pixels at which models read an image of detail ``low``.
LOW_SIDE: Final = 512
_BASE: Final = 85
_PER_TILE: Final = 170
_TILE: Final = 512
_LONGEST_SIDE: Final = 2048
_SHORTEST_SIDE: Final = 768
#: Most tokens of one image: 2048 by 768 pixels are 4 by 2 tiles.
MOST_TOKENS: Final = _BASE + 8 * _PER_TILE


def tokens_of_image(width: int, height: int, detail: str | None = None) -> int:
    """Estimate the input tokens of an image; models of other makers count differently.

    Args:
        width, height: pixels, >= 1.
        detail: ``low``, ``high`` or ``auto``; None and ``auto`` count as ``high``.

    Source: https://platform.openai.com/docs/guides/images-vision, models that count tiles of 512 pixels.

    >>> tokens_of_image(1024, 1024), tokens_of_image(2048, 4096), tokens_of_image(4096, 8192, "low")
    (765, 1105, 85)
    """
    if detail == "low":
        return _BASE
    scale = min(1.0, _LONGEST_SIDE / max(width, height))
    scale = min(scale, _SHORTEST_SIDE / min(width, height))
    across, down = (max(1, math.ceil(round(side * scale) / _TILE)) for side in (width, height))
    return _BASE + _PER_TILE * across * down
