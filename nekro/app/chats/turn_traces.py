"""The places of turns among traces."""

from __future__ import annotations

from nekro.broker.tracing import TurnTrace
from storage.repositories.rounds import Round

__all__ = ["trace_of"]


def trace_of(item: Round) -> TurnTrace:
    """Return the place of a round's turn."""
    return TurnTrace(turn_id=item.turn_id, root_turn_id=item.root_turn_id or item.turn_id)
