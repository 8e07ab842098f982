"""Dependencies of routes: ``user: DBUser = Depends(get_current_active_user)``.

There are no accounts and no log-in here. A request's user is the holder of the gateway's key that it carries,
as ``Authorization: Bearer nk_…``; without a valid key the answer is 401.
"""

from __future__ import annotations

from inspect import Signature
from typing import Any, NoReturn

from nekro_agent.execution.current import current_caller
from nekro_agent.models.db_user import DBUser
from nekro_agent.services.user.role import Role

__all__ = ["get_current_active_user", "get_current_super_user", "get_current_user"]


async def get_current_user(request: object = None, token: str | None = None) -> DBUser:
    """Return the user of the request that is served; the arguments are not needed."""
    caller = current_caller()
    if caller is None:
        _refuse(401, "send a key of the gateway: Authorization: Bearer nk_…")
    return DBUser(
        username=caller.name, platform_userid=caller.user_id or caller.name, perm_level=caller.level
    )


async def get_current_active_user(current_user: DBUser | None = None) -> DBUser:
    """Return the user, who must not be banned."""
    user = await get_current_user() if current_user is None else current_user
    if not user.is_active:
        _refuse(403, "this user is banned")
    return user


async def get_current_super_user(current_user: DBUser | None = None) -> DBUser:
    """Return the user, whose key must have the scope ``admin``."""
    user = await get_current_active_user(current_user)
    if user.perm_level < Role.Super:
        _refuse(403, "this needs a key with the scope admin")
    return user


def _refuse(status: int, reason: str) -> NoReturn:
    from starlette.exceptions import HTTPException  # only processes that serve routes have it

    raise HTTPException(status, reason)


def _without_parameters(*functions: Any) -> None:
    """Keep FastAPI, which asks for the signature, from taking parameters for parts of the request."""
    for function in functions:
        function.__signature__ = Signature()


_without_parameters(get_current_user, get_current_active_user, get_current_super_user)
