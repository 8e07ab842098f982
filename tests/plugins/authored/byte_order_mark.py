"""A file with a byte order mark and Windows line ends."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin(name="带BOM", module_name="byte_order_mark", description="", version="1", author="Ada", url="")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "问候")
async def greet_bom(_ctx, name: str) -> str:
    """Greet."""
    return f"你好，{name}"
