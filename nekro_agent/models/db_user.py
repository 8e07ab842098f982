"""The user model that plugins of the reference query."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Self

from pydantic import Field

from nekro_agent import runtime
from nekro_agent.models.base import MAX_ROWS, QueryModel, aware
from nekro_agent.records import UserInfo
from nekro_agent.shared_clock import shared_time

__all__ = ["DBUser"]

_CONTENT = ("username", "perm_level", "ban_until", "prevent_trigger_until", "ext_data")


class DBUser(QueryModel):
    """A person who has written in a chat of an adapter.

    Messages of a banned person, or of one whose triggering is prevented, are recorded and start no turn.
    There are no accounts here: ``perm_level`` is for plugins, and users have no passwords.
    """

    _changeable = frozenset(_CONTENT)

    id: int = 0
    username: str = ""
    password: str = ""
    adapter_key: str = ""
    platform_userid: str
    perm_level: int = 0
    login_time: datetime | None = None
    #: None means not banned. A time without zone is UTC.
    ban_until: datetime | None = None
    #: None means no restriction. A time without zone is UTC.
    prevent_trigger_until: datetime | None = None
    ext_data: Any = Field(default_factory=dict)
    create_time: datetime | None = None
    update_time: datetime | None = None

    @property
    def user_id(self) -> str:
        """The same as ``platform_userid``."""
        return self.platform_userid

    @property
    def unique_id(self) -> str:
        """Adapter and platform id."""
        return f"{self.adapter_key}:{self.platform_userid}"

    @property
    def is_active(self) -> bool:
        """Whether the person is not banned at present."""
        return self.ban_until is None or shared_time() > aware(self.ban_until)

    @property
    def is_prevent_trigger(self) -> bool:
        """Whether messages of the person start no turn at present."""
        return self.prevent_trigger_until is not None and shared_time() < aware(self.prevent_trigger_until)

    @classmethod
    async def get_by_union_id(cls, adapter_key: str, platform_userid: str) -> Self | None:
        """Return a person of an adapter, or of any if it is empty; None if there is none."""
        conditions = {"adapter_key": adapter_key} if adapter_key else {}
        return await cls.get_or_none(platform_userid=platform_userid, **conditions)

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        records = runtime.current().service("records")
        wanted = equal.get("platform_userid")
        rows = await records.users(platform_userid=None if wanted is None else str(wanted), limit=MAX_ROWS)
        return [cls._of(row) for row in rows]

    @classmethod
    def _of(cls, record: UserInfo, **others: Any) -> Self:
        ext_data = {} if record.ext_data is None else record.ext_data
        return super()._of(record, login_time=record.created_at, ext_data=ext_data, **others)

    async def _insert(self) -> Self:
        changes = {name: aware(getattr(self, name)) for name in _CONTENT if name in self.model_fields_set}
        records = runtime.current().service("records")
        return self._of(await records.change_user(self.adapter_key, self.platform_userid, changes))

    async def _update(self, changes: dict[str, Any]) -> None:
        values = {name: aware(value) for name, value in changes.items()}
        records = runtime.current().service("records")
        await records.change_user(self.adapter_key, self.platform_userid, values)

    async def _remove(self) -> bool:
        return await runtime.current().service("records").delete_user(self.id)
