"""The root file of a cloned repository without a package."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

from .helpers import double

plugin = NekroPlugin(name="rooted", module_name="rooted", description="", version="1", author="Ada", url="")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "double")
async def doubled(_ctx, value: int) -> int:
    """Double."""
    return double(value)
