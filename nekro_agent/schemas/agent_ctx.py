"""``AgentCtx``: the context of the call that a plugin method or hook serves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

from nekro_agent import layout
from nekro_agent.errors import InvalidValueError, ResultError
from nekro_agent.files.file_system import FileSystem

if TYPE_CHECKING:
    from pathlib import Path

    from nekro_agent.models.db_chat_channel import DBChatChannel
    from nekro_agent.models.db_preset import DefaultPreset
    from nekro_agent.models.db_user import DBUser
    from nekro_agent.policies import CoreConfig

__all__ = ["AgentCtx", "WebhookRequest"]


class WebhookRequest(BaseModel):
    """The HTTP request that a webhook method serves."""

    headers: dict[str, str] = {}
    body: Any = None


_Context = TypeVar("_Context", bound="AgentCtx")


@functools.cache
def _blank(kind: type[_Context]) -> _Context:
    return kind()


class AgentCtx(BaseModel):
    """Context of one call: chat, user, sandbox, and shortcuts to files and messages.

    The application builds it from the signed invocation (:meth:`for_call`); sandboxed code cannot
    influence it. It must stay on the host, so pickling it is an error.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="ignore")

    container_key: str | None = None
    from_chat_key: str | None = None
    webhook_request: WebhookRequest | None = None
    channel_id: str | None = None
    channel_name: str | None = None
    channel_type: str | None = None
    adapter_key: str | None = None
    extra_data: dict[str, Any] = {}

    _user_id: str | None = PrivateAttr(None)
    _plugin_key: str | None = PrivateAttr(None)
    _call_id: str | None = PrivateAttr(None)
    _round_id: str | None = PrivateAttr(None)
    _on_progress: Callable[[float, str], None] | None = PrivateAttr(None)

    @classmethod
    def for_call(
        cls,
        *,
        chat_key: str | None,
        container_key: str | None = None,
        user_id: str | None = None,
        adapter_key: str | None = None,
        channel_id: str | None = None,
        channel_name: str | None = None,
        channel_type: str | None = None,
        plugin_key: str | None = None,
        call_id: str | None = None,
        round_id: str | None = None,
        webhook_request: WebhookRequest | None = None,
        on_progress: Callable[[float, str], None] | None = None,
    ) -> Self:
        """Build a context from plain values.

        Args:
            chat_key: None only for webhooks, which belong to no chat.
            container_key: None derives the chat's own.
            user_id: platform id of the user that triggered the turn; None or "" if there is none.
            on_progress: receives the arguments of ``report_progress``.
        """
        if container_key is None and chat_key:
            container_key = layout.default_container_key(chat_key)
        # Copying and filling in directly takes half the time of validation, and the values are our own.
        ctx: Self = _blank(cls).__copy__()
        ctx.__dict__.update(
            from_chat_key=chat_key or None,
            container_key=container_key,
            adapter_key=adapter_key,
            channel_id=channel_id,
            channel_name=channel_name,
            channel_type=channel_type,
            webhook_request=webhook_request,
            extra_data={},
        )
        private = ctx.__pydantic_private__
        assert private is not None  # noqa: S101 - the class has private attributes
        private.update(
            # "" would mean "no user scope" in plugin.store, so an unknown user is always None.
            _user_id=user_id or None,
            _plugin_key=plugin_key,
            _call_id=call_id,
            _round_id=round_id,
            _on_progress=on_progress,
        )
        return ctx

    def for_plugin(self, plugin_key: str) -> Self:
        """Return a copy for another plugin, since hooks of several plugins share one event."""
        other = self.model_copy()
        other._plugin_key = plugin_key
        return other

    @property
    def chat_key(self) -> str:
        """Key of the chat.

        Raises:
            InvalidValueError: this context belongs to no chat (a webhook's).
        """
        if not self.from_chat_key:
            raise InvalidValueError(
                "this context belongs to no chat (a webhook's has none): chat_key is unknown"
            )
        return self.from_chat_key

    @property
    def from_platform_userid(self) -> str | None:
        """Platform id of the user that triggered the turn; None if there is none."""
        return self._user_id

    @property
    def from_user_id(self) -> str | None:
        """Like :attr:`from_platform_userid`, under its older name."""
        return self._user_id

    @property
    def plugin_key(self) -> str | None:
        """Key of the plugin whose code is running; None outside plugins."""
        return self._plugin_key

    @property
    def call_id(self) -> str | None:
        """Id of the sandbox call that is served; None in hooks."""
        return self._call_id

    @property
    def round_id(self) -> str | None:
        """Id of the LLM round whose code called; None outside rounds."""
        return self._round_id

    @property
    def fs(self) -> FileSystem:
        """File exchange between this plugin and the chat's sandboxed code."""
        container_key = self.container_key or layout.default_container_key(self.chat_key)
        return FileSystem(self.chat_key, container_key, plugin_key=self._plugin_key)

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
        """The chat as the model that plugins query."""
        from nekro_agent.models.db_chat_channel import DBChatChannel

        return DBChatChannel.of_context(self)

    @property
    def db_user(self) -> DBUser | None:
        """The triggering user as the model that plugins query; None if there is none."""
        from nekro_agent.models.db_user import DBUser

        return DBUser.of_context(self)

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

    def report_progress(self, percent: float, message: str = "") -> None:
        """Report the progress of a long method, shown by ``nekro jobs``; no effect outside of a call.

        Args:
            percent: 0 to 100.
        """
        if self._on_progress is not None:
            self._on_progress(max(0.0, min(float(percent), 100.0)), message)

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
        return cls.for_call(
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

    async def current_preset(self) -> DefaultPreset:
        """Return the agent's persona."""
        from nekro_agent.models.db_preset import DefaultPreset

        return DefaultPreset.current()

    async def get_preset_by_id(self, preset_id: int) -> DefaultPreset | None:
        """Return the configured persona for its id -1, None for any other id: no others are stored."""
        return await self.current_preset() if preset_id == -1 else None

    async def get_effective_preset_by_id(self, preset_id: int) -> DefaultPreset:
        """Return the effective persona, which is always the configured one."""
        return await self.current_preset()

    def set_preset(self, preset_id: int) -> NoReturn:
        """Raise an error: personas are configured, not stored.

        Raises:
            InvalidValueError: always.
        """
        raise InvalidValueError(f"preset {preset_id} cannot be set: the persona is NEKRO_AGENT__PERSONA")

    def __await__(self) -> Generator[Any, None, Self]:
        """Return the context itself, because one factory is a coroutine only in some API versions."""
        yield from ()
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse pickling: a context must not cross into a sandbox or a message."""
        raise ResultError("AgentCtx cannot leave its process; return the values you need from it instead")
