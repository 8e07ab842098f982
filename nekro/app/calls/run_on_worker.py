"""Runs a hook in a process that has the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from broker_config.topology import HOOK_TASK
from nekro.app.calls.plugin_tasks import PluginTasks
from nekro.app.chats.contexts import chat_of
from nekro.broker.calls import MethodCaller
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage

__all__ = ["CONFIG_HOOK", "MCP_HOOK", "WITH_CHANGES", "run_on_worker"]

#: Not a hook of plugins: reads the configuration or changes it. Its argument is None or the new values.
CONFIG_HOOK: Final = "nekro_config"
#: The same: tries the MCP server of the plugin.
MCP_HOOK: Final = "nekro_mcp"
#: Follows the message of a hook if the caller understands ``{"signal", "changes"}`` as the answer.
WITH_CHANGES: Final = "with_changes"


async def run_on_worker(
    caller: MethodCaller,
    tasks: PluginTasks,
    plugin_key: str,
    hook: str,
    ctx: AgentCtx,
    args: tuple[Any, ...],
    *,
    seconds: float,
) -> object:
    """Run a hook in a process that may run the plugin; returns its text, signal or methods.

    What it changes in a message is changed in the given one too.

    Raises:
        The errors of ``PluginTasks.run``.
    """
    plain: list[Any] = [arg.model_dump(mode="json") if isinstance(arg, ChatMessage) else arg for arg in args]
    message = next((arg for arg in args if isinstance(arg, ChatMessage)), None)
    if message is not None:
        plain.append(WITH_CHANGES)
    answer = await tasks.run(
        caller,
        HOOK_TASK,
        (plugin_key, hook, plain),
        plugin_key=plugin_key,
        chat=chat_of(ctx),
        user_id=ctx.from_user_id,
        timeout_seconds=seconds,
    )
    if message is not None and isinstance(answer, Mapping):
        message.change(answer["changes"])
        return answer["signal"]
    return answer
