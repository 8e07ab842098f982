"""Turns what a plugin method returned into a pickle for the sandbox."""

from __future__ import annotations

import pickle

from nekro_agent.errors import ResultError

__all__ = ["pickled"]


def pickled(value: object) -> bytes:
    """Pickle a value.

    Raises:
        ResultError: it cannot be pickled.
    """
    try:
        return pickle.dumps(value, 4)
    except Exception as exc:
        raise ResultError(f"a {type(value).__name__} cannot be returned: {exc}") from exc
