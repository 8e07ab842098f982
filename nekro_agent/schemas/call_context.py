"""``CallContext``: the part of ``AgentCtx`` that needs no other module of the plugin API."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

from nekro_agent import layout
from nekro_agent.errors import InvalidValueError, ResultError
from nekro_agent.files.file_system import FileSystem

__all__ = ["CallContext", "WebhookRequest"]


class WebhookRequest(BaseModel):
    """The HTTP request that a webhook method serves."""

    headers: dict[str, str] = {}
    body: Any = None


_Context = TypeVar("_Context", bound="CallContext")


@functools.cache
def _blank(kind: type[_Context]) -> _Context:
    return kind()


class CallContext(BaseModel):
    """Context of one call: its chat, user, plugin and files.

    Plugins get its subclass ``AgentCtx``. It must stay on the host, so pickling it is an error.
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
            adapter_key: None takes what the chat key says, as for ``channel_id`` and ``channel_type``.
            on_progress: receives the arguments of ``report_progress``.
        """
        if container_key is None and chat_key:
            container_key = layout.default_container_key(chat_key)
        if chat_key and (adapter_key is None or channel_id is None or channel_type is None):
            derived = layout.channel_of(chat_key)
            adapter_key = derived.adapter_key if adapter_key is None else adapter_key
            channel_id = derived.channel_id if channel_id is None else channel_id
            channel_type = derived.channel_type if channel_type is None else channel_type
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
        """Id of the sandbox call that is served; None in hooks.

        It is the same when the call runs again because its worker died, and no other call has it: a unique
        key on it lets an effect of the method happen once.
        """
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

    def report_progress(self, percent: float, message: str = "") -> None:
        """Report the progress of a long method, shown by ``nekro jobs``; no effect outside of a call.

        Args:
            percent: 0 to 100.
        """
        if self._on_progress is not None:
            self._on_progress(max(0.0, min(float(percent), 100.0)), message)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse pickling: a context must not cross into a sandbox or a message."""
        raise ResultError("AgentCtx cannot leave its process; return the values you need from it instead")
