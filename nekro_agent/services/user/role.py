"""Levels of those who send requests."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Role", "get_perm_role"]


class Role(IntEnum):
    """Who may do what: the holder of a key with the scope ``admin`` is ``Super``, of another one ``User``."""

    Guest = 0
    User = 1
    Admin = 2
    Super = 3


def get_perm_role(level: int) -> str:
    """Return the name of a level."""
    return Role(min(level, Role.Super)).name
