"""Sends work other than methods to the process of a plugin: command lines and hooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from codec.values import decode_value, encode_arguments
from codec.wire import Invocation, new_id
from messaging.calls import MethodCaller
from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time
from workers.plugins.lanes import LaneChooser

__all__ = ["PluginTasks"]


class PluginTasks:
    """Runs tasks of plugins that are not methods, and returns their plain values."""

    def __init__(
        self, lanes: LaneChooser, *, refresh_lanes: Callable[[], Awaitable[None]], return_bytes: int
    ) -> None:
        """Create it.

        Args:
            refresh_lanes: updates ``lanes``; see ``refresh``.
        """
        self.lanes = lanes
        #: Updates ``lanes``; await it before a question about them.
        self.refresh = refresh_lanes
        self._return_bytes = return_bytes

    async def run(
        self,
        caller: MethodCaller,
        task: str,
        arguments: tuple[Any, ...],
        *,
        plugin_key: str,
        chat: ChatInfo,
        user_id: str | None,
        timeout_seconds: float,
    ) -> object:
        """Run a task in the process that may run the plugin, and return its value.

        Raises:
            ArgumentError: an argument or the value is not plain data.
            The errors of ``MethodCaller.call``.
        """
        now = shared_time()
        invocation = Invocation(
            call_id=new_id(),
            method=task,
            chat_key=chat.chat_key,
            container_key=chat.container_key,
            user_id=user_id,
            adapter_key=chat.adapter_key,
            channel_id=chat.channel_id,
            channel_name=chat.channel_name,
            channel_type=chat.channel_type,
            wakes_agent=False,
            issued_at=now,
            deadline=now + timedelta(seconds=timeout_seconds),
            args=encode_arguments(arguments, {}),
        )
        envelope = await caller.call(invocation, lane=self.lanes.lane_of_plugin(plugin_key))
        return decode_value(envelope.value or "", max_bytes=self._return_bytes)
