"""A method without a docstring: callable, and not listed for the LLM."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin(
    name="undocumented", module_name="missing_docstring", description="", version="1", author="Ada", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "秘密")
async def undocumented(_ctx, value):
    return value * 2
