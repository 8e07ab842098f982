"""Pictures of people on QQ."""

from __future__ import annotations

from typing import Final

from nekro_agent.errors import InvalidValueError
from nekro_agent.schemas.call_context import CallContext

__all__ = ["get_avatar"]

_AVATAR_URL: Final = "https://q1.qlogo.cn/g?b=qq&nk={user_id}&s=640"


async def get_avatar(user_qq: str | int, ctx: CallContext) -> str:
    """Download the avatar of a QQ user into the chat's uploads and return its sandbox path.

    Raises:
        InvalidValueError: the id is no QQ number.
        DownloadError: the picture could not be fetched.
        UploadQuotaError: the chat's uploads have no space for it.
    """
    user_id = str(user_qq).strip()
    if not (user_id.isascii() and user_id.isdecimal()):
        raise InvalidValueError(f"get_avatar: {user_qq!r} is not a QQ number")
    return await ctx.fs.mixed_forward_file(_AVATAR_URL.format(user_id=user_id), f"avatar_{user_id}.png")
