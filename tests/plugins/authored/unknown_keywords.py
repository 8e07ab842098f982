"""Constructor arguments of other versions of the API."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin(
    name=" odd ",
    module_name=" unknown_keywords ",
    description=" d ",
    version=" 1.0 ",
    author=" Ada ",
    url=" https://example.com ",
    is_system=True,
    min_agent_version="9.9",
    icon="🧩",
)

old_style = NekroPlugin("old", "old_style", "v1 order", "1", "Ada", "url", True)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "identity")
async def identity(_ctx) -> list:
    """Say who this is."""
    return [plugin.key, plugin.version, plugin.url, old_style.is_builtin, plugin.support_adapter]
