"""Packages asked for while the module is imported; the workers' environment has them."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType, dynamic_import_pkg
from nekro_agent.api.schemas import AgentCtx

httpx = dynamic_import_pkg("httpx>=0.20")
yaml = dynamic_import_pkg("PyYAML", import_name="yaml")

plugin = NekroPlugin(
    name="packages", module_name="packages_at_import", description="", version="1", author="Ada", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "parse")
async def parse_yaml(_ctx: AgentCtx, text: str) -> dict:
    """Parse YAML."""
    return {"content": yaml.safe_load(text), "client": httpx.__name__}
