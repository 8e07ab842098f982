"""Methods that a person must approve."""

import asyncio
import os

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Till", module_name="till", description="Test methods.", version="1.0.0", author="tests", url=""
)


def note(line: str) -> None:
    """Append a line to the journal; O_APPEND keeps lines of several processes whole."""
    path = plugin.get_plugin_data_dir() / "journal.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "pay", requires_approval=True)
async def pay(_ctx: AgentCtx, who: str, amount: int = 1) -> str:
    """Pay someone."""
    note(f"paid {who} {amount}")
    return f"receipt {who} {amount}"


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "announce", requires_approval=True)
async def announce(_ctx: AgentCtx, text: str) -> str:
    """Tell everyone."""
    note(f"announced {text}")
    return f"announced {text}"


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "inspect", requires_approval=True)
async def inspect(_ctx: AgentCtx, what: str) -> str:
    """Look at something private."""
    note(f"inspected {what}")
    return f"inspected {what}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "pay_slowly", requires_approval=True)
async def pay_slowly(_ctx: AgentCtx, who: str) -> str:
    """Pay someone, after a moment."""
    note(f"begin {who}")
    await asyncio.sleep(0.5)
    note(f"paid {who}")
    return f"receipt {who}"
