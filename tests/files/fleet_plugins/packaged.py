"""A plugin that imports a package at its import, and another one in a method."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType, dynamic_import_pkg
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Packaged", module_name="packaged", description="Versions.", version="1.0.0", author="tests", url=""
)
early = dynamic_import_pkg("fleet-early>=1")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "versions", "Returns versions")
async def versions(_ctx: AgentCtx) -> str:
    """Return the versions of two packages, and where the first one is."""
    late = dynamic_import_pkg("fleet-late")
    return f"{early.VERSION} {late.VERSION} {early.__file__}"
