"""Routes that ask who sends the request, in the manner of published plugins."""

from fastapi import APIRouter, Depends

from nekro_agent.api.plugin import NekroPlugin
from nekro_agent.models.db_user import DBUser
from nekro_agent.services.user.deps import get_current_active_user, get_current_super_user
from nekro_agent.services.user.perm import Role, check_role, require_role

plugin = NekroPlugin(
    name="members", module_name="web_members", description="", version="1", author="Ada", url=""
)
router = APIRouter()


@router.get("/me")
async def me(user: DBUser = Depends(get_current_active_user)) -> list:  # noqa: B008
    return [user.username, user.platform_userid, user.perm_level, check_role(user, Role.Admin)]


@router.get("/settings/{name}")
@require_role(Role.Admin)
async def settings(name: str, _current_user: DBUser = Depends(get_current_active_user)) -> str:  # noqa: B008
    return f"{name} for {_current_user.username}"


@router.delete("/all")
async def remove(user: DBUser = Depends(get_current_super_user)) -> str:  # noqa: B008
    return "removed"


@plugin.mount_router()
def create_router() -> APIRouter:
    return router
