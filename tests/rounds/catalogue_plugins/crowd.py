"""Three hundred methods, of which one is wanted."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Crowd", module_name="crowd", description="Many methods.", version="1.0.0", author="tests", url=""
)
WANTED = 217


def _mount(number: int) -> None:
    async def method(_ctx: AgentCtx, amount: int, unit: str = "kg") -> str:
        return f"{number}: {amount} {unit}"

    what = "the weight of an elephant" if number == WANTED else f"item {number} of the warehouse"
    method.__name__ = method.__qualname__ = f"measure_{number}"
    method.__doc__ = f"""Measure {what}.

    Args:
        amount (int): How many.
        unit (str): The unit of the result.
    """
    plugin.mount_sandbox_method(SandboxMethodType.TOOL, method.__name__, "")(method)


for each in range(300):
    _mount(each)
