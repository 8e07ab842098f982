"""The user model that plugins of the reference query."""

from __future__ import annotations

from typing import Any, Self

from nekro_agent import runtime
from nekro_agent.models.base import MAX_ROWS, QueryModel
from nekro_agent.ports import MessageKind

__all__ = ["DBUser"]


class DBUser(QueryModel):
    """A person with recorded messages; there are no accounts here, so permissions are the lowest."""

    platform_userid: str
    adapter_key: str = ""
    username: str = ""
    perm_level: int = 0

    @property
    def user_id(self) -> str:
        """The same as ``platform_userid``."""
        return self.platform_userid

    @classmethod
    async def get_by_union_id(cls, adapter_key: str, platform_userid: str) -> Self | None:
        """Return a person of a platform, or None."""
        conditions = {"adapter_key": adapter_key} if adapter_key else {}
        return await cls.get_or_none(platform_userid=platform_userid, **conditions)

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        records = runtime.current().service("records")
        users: dict[tuple[str, str], Self] = {}
        for row in await records.messages(chat_key=None, since=None, limit=MAX_ROWS):
            if row.kind is MessageKind.USER and row.sender_id:
                key = (row.adapter_key or "", row.sender_id)
                users.setdefault(
                    key,
                    cls(
                        platform_userid=row.sender_id,
                        adapter_key=row.adapter_key or "",
                        username=row.sender_name or "",
                    ),
                )
        return list(users.values())
