"""Sends work other than methods to the process of a plugin: command lines and hooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from nekro.app.calls.dispatch import CallScope
from nekro.broker.calls import MethodCaller
from nekro.plugins.lanes import LaneChooser
from nekro.wire.invocation import new_id
from nekro.wire.values import decode_value, encode_arguments
from nekro_agent.execution.payer import current_account
from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time

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
        lane: str | None = None,
        call_id: str | None = None,
    ) -> object:
        """Run a task in the process that may run the plugin, and return its value.

        Args:
            lane: None means the lane of the plugin's commands and hooks.
            call_id: None makes a new one.

        Raises:
            ArgumentError: an argument or the value is not plain data.
            The errors of ``MethodCaller.call``.
        """
        invocation = CallScope(
            chat=chat, user_id=user_id, wakes_agent=False, account_id=current_account()
        ).invocation(
            task,
            encode_arguments(arguments, {}),
            call_id=call_id or new_id(),
            deadline=shared_time() + timedelta(seconds=timeout_seconds),
        )
        envelope = await caller.call(invocation, lane=lane or self.lanes.lane_of_plugin(plugin_key))
        return decode_value(envelope.value or "", max_bytes=self._return_bytes)
