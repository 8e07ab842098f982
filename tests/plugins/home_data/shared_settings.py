"""共享配置: keeps its configuration in a name of the module, as most plugins do."""

import os

from nekro_agent.api.plugin import ConfigBase, NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="共享配置", module_name="shared_settings", description="", version="1.0.0", author="Bob", url=""
)


@plugin.mount_config()
class SharedConfig(ConfigBase):
    """配置"""

    GREETING: str = "hello"


config: SharedConfig = plugin.get_config(SharedConfig)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="问候", description="")
async def greeting(_ctx: AgentCtx) -> list:
    """Return the greeting and the process that knows it."""
    return [config.GREETING, os.getpid()]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="改问候", description="")
async def change_greeting(_ctx: AgentCtx, greeting: str) -> int:
    """Change the greeting."""
    config.GREETING = greeting
    plugin.save_config(config)
    return os.getpid()
