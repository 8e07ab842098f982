"""``Ending``: the end of a delivery as part of the script that stores its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from messaging.delivery.offers import PlaceOffer

__all__ = ["Ack", "Ending"]

#: Key of the index, key of the held messages, tag.
Ack = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Ending:
    """Additional work of the script that stores a result: acknowledge the delivery, offer its place."""

    ack: Ack
    #: None: do not offer the place.
    offer: PlaceOffer | None
    #: Call it once with whether the result was stored; if not, Celery acknowledges the delivery.
    end: Callable[[bool], None]
