"""Checks of the level of a request's user."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from nekro_agent.models.db_user import DBUser
from nekro_agent.services.user.deps import get_current_active_user
from nekro_agent.services.user.role import Role, get_perm_role

__all__ = ["Role", "check_role", "get_perm_role", "require_role"]

P = ParamSpec("P")
T = TypeVar("T")


def require_role(min_role: Role) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Let a route serve only requests of users of a level or a higher one; others get 401 or 403."""

    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @wraps(function)
        async def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if not check_role(await get_current_active_user(), min_role):
                from starlette.exceptions import HTTPException

                raise HTTPException(403, f"this needs the role {min_role.name}")
            return await function(*args, **kwargs)

        return checked

    return decorate


def check_role(user: DBUser, min_role: Role) -> bool:
    """Return whether a user has a level or a higher one."""
    return user.perm_level >= min_role
