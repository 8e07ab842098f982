"""An extension that only tests have: a chat platform whose only client posts messages and fetches answers."""

from __future__ import annotations

from typing import Final

from nekro.app.extensions import Extension

__all__ = ["EXTENSION"]

EXTENSION: Final = Extension(
    name="telegraph",
    settings="nekro.extensions.telegraph.settings:TelegraphSettings",
    adapters=("telegraph",),
    gateway="nekro.extensions.telegraph.routes:GATEWAY_PART",
)
