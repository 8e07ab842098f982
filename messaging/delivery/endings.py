"""``Ending``: the end of a delivery as part of the script that stores its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from messaging.delivery.offers import PlaceOffer

__all__ = ["Ack", "AckRecorder", "Ending", "OfferRecorder"]

#: Key of the index, key of the held messages, tag.
Ack = tuple[str, str, str]


class AckRecorder(Protocol):
    """Records acknowledgements that another component sends; see ``messaging.delivery.leases``."""

    def ended(self, ack: Ack, *, is_done: bool) -> None:
        """Record the outcome; if ``is_done`` is False, the delivery must still be acknowledged."""
        ...


class OfferRecorder(Protocol):
    """Records offers that another component sends; see ``messaging.delivery.handoff``."""

    def offer_arrived(self) -> None:
        """Record that Redis has the offer, or never will."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """Additional work of the script that stores a result: acknowledge the delivery, offer its place."""

    ack: Ack
    #: None: do not offer the place.
    offer: PlaceOffer | None
    keeper: AckRecorder
    handoff: OfferRecorder

    def end(self, *, is_stored: bool) -> None:
        """Report the outcome; if the result was not stored, the delivery is acknowledged by Celery."""
        self.keeper.ended(self.ack, is_done=is_stored)
        if self.offer is not None:
            self.handoff.offer_arrived()
