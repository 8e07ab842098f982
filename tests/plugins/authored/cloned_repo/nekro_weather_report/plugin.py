from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin(
    name="weather", module_name="weather_report", description="", version="1", author="Ada", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "report")
async def report(_ctx, city: str = "Kyoto") -> str:
    """Report."""
    return f"{city}: sunny"
