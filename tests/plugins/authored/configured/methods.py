from nekro_agent.api.plugin import SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

from .settings import Config, config, plugin


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "show")
async def show_config(_ctx: AgentCtx) -> dict:
    """Show the configuration as the module's own variable has it."""
    plugin.get_config(Config)
    return {"limit": config.LIMIT, "names": config.NAMES, "same": config is plugin.get_config(Config)}


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "raise")
async def raise_limit(_ctx: AgentCtx) -> str:
    """Change the configuration and save it."""
    config.LIMIT += 1
    plugin.save_config(config)
    return str(config.LIMIT)
