"""The ids of a turn's trace, which every process derives from the turn's id."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

__all__ = ["TurnTrace"]


@dataclass(frozen=True, kw_only=True)
class TurnTrace:
    """A turn in a trace.

    The ids are hashes and not the turn's id itself: samplers take the last 64 bits of a trace id for a random
    number, and in those of a UUID two bits are constant.
    """

    turn_id: str
    #: The turn whose work caused this one, by an approved or detached call or a job; both are in its trace.
    #: The turn itself if there is none.
    root_turn_id: str

    @property
    def trace_id(self) -> int:
        """Id of the trace, 128 bits."""
        return _number(f"trace {self.root_turn_id}", 16)

    @property
    def span_id(self) -> int:
        """Id of the span of the whole turn, 64 bits."""
        return _number(f"turn {self.turn_id}", 8)

    @property
    def root(self) -> TurnTrace:
        """The turn that began the trace."""
        return TurnTrace(turn_id=self.root_turn_id, root_turn_id=self.root_turn_id)

    @property
    def is_root(self) -> bool:
        """Whether the turn began the trace."""
        return self.turn_id == self.root_turn_id


def _number(text: str, size: int) -> int:
    # Zero is not a valid id.
    return int.from_bytes(sha256(f"nekro {text}".encode()).digest()[:size]) or 1
