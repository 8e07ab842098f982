"""``AgentCtx``: the context of the call that a plugin method or hook serves."""

from __future__ import annotations

from collections.abc import Generator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from nekro_agent.errors import InvalidValueError
from nekro_agent.execution import greenlets as bridge
from nekro_agent.execution.current import current_payer
from nekro_agent.schemas.call_context import CallContext, WebhookRequest

if TYPE_CHECKING:
    from pathlib import Path

    from nekro_agent.models.db_chat_channel import DBChatChannel
    from nekro_agent.models.db_preset import DBPreset, DefaultPreset
    from nekro_agent.models.db_user import DBUser
    from nekro_agent.runtime import CoreConfig

__all__ = ["AgentCtx", "WebhookRequest"]


class AgentCtx(CallContext):
    """Context of one call: chat, user, sandbox, and shortcuts to files and messages.

    The application builds it from the signed invocation (:meth:`for_call`); sandboxed code cannot
    influence it. It must stay on the host, so pickling it is an error.
    """

    @property
    def ms(self) -> ModuleType:
        """The module ``nekro_agent.api.message``."""
        from nekro_agent.api import message

        return message

    @property
    def adapter(self) -> NoReturn:
        """Raise an error, because a worker has no adapter objects.

        Raises:
            InvalidValueError: always; ``adapter_key`` names the adapter.
        """
        raise InvalidValueError("a worker has no adapter objects; adapter_key names the adapter")

    @property
    def db_chat_channel(self) -> DBChatChannel:
        """The chat as the model that plugins query; read anew at each access.

        In a task or thread of the plugin's own it has only what this context contains; there, use
        ``await DBChatChannel.get_channel(…)``.
        """
        from nekro_agent.models.db_chat_channel import DBChatChannel

        if bridge.can_wait():
            found = bridge.wait(DBChatChannel.get_or_none(chat_key=self.chat_key))
            if found is not None:
                return found
        return DBChatChannel(
            chat_key=self.chat_key,
            adapter_key=self.adapter_key or "",
            channel_id=self.channel_id or "",
            channel_name=self.channel_name or "",
            channel_type=self.channel_type or "",
            container_key=self.container_key,
        )

    @property
    def db_user(self) -> DBUser | None:
        """The triggering user as the model that plugins query; None if there is none.

        Read as ``db_chat_channel``; there, use ``await DBUser.get_by_union_id(…)``.
        """
        from nekro_agent.models.db_user import DBUser

        user_id, adapter_key = self.from_platform_userid, self.adapter_key or ""
        if user_id is None:
            return None
        if bridge.can_wait():
            found = bridge.wait(DBUser.get_or_none(platform_userid=user_id, adapter_key=adapter_key))
            if found is not None:
                return found
        return DBUser(platform_userid=user_id, adapter_key=adapter_key)

    async def send_text(self, content: str, *, record: bool = True) -> None:
        """Send a text to this chat."""
        from nekro_agent.api import message

        await message.send_text(self.chat_key, content, self, record=record)

    async def send_image(self, file_path: str | Path, *, record: bool = True) -> None:
        """Send an image (URL, sandbox path, or a file of this plugin) to this chat."""
        from nekro_agent.api import message

        await message.send_image(self.chat_key, file_path, self, record=record)

    async def send_file(self, file_path: str | Path, *, record: bool = True) -> None:
        """Send a file (URL, sandbox path, or a file of this plugin) to this chat."""
        from nekro_agent.api import message

        await message.send_file(self.chat_key, file_path, self, record=record)

    async def push_system(self, message: str, trigger_agent: bool = False) -> None:
        """Add a system message to this chat's history; optionally trigger the agent."""
        from nekro_agent.api import message as messages

        await messages.push_system(self.chat_key, message, self, trigger_agent=trigger_agent)

    @classmethod
    async def create_by_chat_key(
        cls,
        chat_key: str,
        container_key: str | None = None,
        from_chat_key: str | None = None,
        webhook_request: WebhookRequest | None = None,
        **unused: object,
    ) -> Self:
        """Return a context for code that acts on a chat outside of a call."""
        from nekro_agent.models.db_chat_channel import DBChatChannel

        channel = await DBChatChannel.get_channel(chat_key=chat_key)
        return cls.create_by_db_chat_channel(channel, container_key, from_chat_key, webhook_request)

    @classmethod
    def create_by_db_chat_channel(
        cls,
        db_chat_channel: DBChatChannel,
        container_key: str | None = None,
        from_chat_key: str | None = None,
        webhook_request: WebhookRequest | None = None,
        **unused: object,
    ) -> Self:
        """Return a context for a chat that was looked up; ``await`` is allowed but not needed.

        Args:
            container_key: None takes the chat's own.
            from_chat_key: None takes the channel's.
        """
        payer = current_payer()
        return cls.for_call(
            plugin_key=payer.plugin_key if payer else None,
            chat_key=from_chat_key or db_chat_channel.chat_key,
            container_key=container_key or db_chat_channel.container_key,
            webhook_request=webhook_request,
            adapter_key=db_chat_channel.adapter_key or None,
            channel_id=db_chat_channel.channel_id or None,
            channel_name=db_chat_channel.channel_name or None,
            channel_type=db_chat_channel.channel_type or None,
        )

    @classmethod
    async def create_by_webhook(cls, webhook_request: WebhookRequest, **unused: object) -> Self:
        """Return a context for a webhook, which belongs to no chat."""
        return cls.for_call(chat_key=None, webhook_request=webhook_request)

    async def get_core_config(self) -> CoreConfig:
        """Return the global configuration."""
        from nekro_agent.core.config import config

        return config

    async def get_bound_workspace(self) -> None:
        """Return None: there are no workspaces here."""
        return None

    # These two are not coroutines, because they must raise even when called without ``await``.
    def get_onebot_v11_bot(self) -> NoReturn:
        """Raise an error, because a worker has no bot object.

        Raises:
            InvalidValueError: always; the message names the alternative.
        """
        raise InvalidValueError(
            f"a worker has no OneBot connection (adapter: {self.adapter_key}); "
            "send through _ctx.send_text, _ctx.send_image or _ctx.send_file"
        )

    async def current_preset(self) -> DefaultPreset | DBPreset:
        """Return the agent's persona in this chat."""
        from nekro_agent.models.db_chat_channel import DBChatChannel

        return await (await DBChatChannel.get_channel(self.chat_key)).get_preset()

    async def get_preset_by_id(self, preset_id: int) -> DBPreset | None:
        """Return a stored persona; None if there is none of that id, as for -1, the configured persona."""
        from nekro_agent.models.db_preset import DBPreset

        return await DBPreset.get_or_none(id=preset_id)

    async def get_effective_preset_by_id(self, preset_id: int) -> DefaultPreset | DBPreset:
        """Return a stored persona, or the configured one if there is no such persona."""
        from nekro_agent.models.db_preset import DefaultPreset

        return await self.get_preset_by_id(preset_id) or DefaultPreset.current()

    async def set_preset(self, preset_id: int | None) -> bool:
        """Choose the agent's persona in this chat; returns whether it was another one before.

        Args:
            preset_id: id of a stored preset; None and -1 mean the configured persona.

        Raises:
            InvalidValueError: no preset has this id.
        """
        from nekro_agent.models.db_chat_channel import DBChatChannel

        channel = await DBChatChannel.get_channel(self.chat_key)
        before = channel.preset_id
        await channel.set_preset(preset_id)
        return channel.preset_id != before

    def __await__(self) -> Generator[Any, None, Self]:
        """Return the context itself, because one factory is a coroutine only in some API versions."""
        yield from ()
        return self
