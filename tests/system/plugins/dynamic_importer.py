"""Names that the sandbox itself offers, in the manner of a plugin that ships with Nekro Agent."""

from nekro_agent.api import i18n
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Importer",
    module_name="dynamic_importer",
    description="Has methods with names of the sandbox",
    version="0.1.0",
    author="KroMiose",
    url="https://example.org",
    i18n_name=i18n.i18n_text(zh_CN="导入", en_US="Importer"),
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="dynamic_importer", description="Import a package")
async def dynamic_importer(
    _ctx: AgentCtx, package_spec: str, import_name: str | None = None, timeout: int = 300
):
    """Import a package.

    Args:
        package_spec (str): Name of the package.
    """
    return f"{package_spec} from the plugin"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="method_0", description="Has a numbered label")
async def MethodError(_ctx: AgentCtx) -> str:
    """Has the name of the sandbox's exception."""
    return "no error"
