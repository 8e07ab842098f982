"""Methods whose work costs money."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.services.agent.openai import gen_openai_chat_response

plugin = NekroPlugin("Asker", "asker", "asks a model", "1", "tests", "http://x")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "ask", "Ask a model.")
async def ask(_ctx: AgentCtx, base_url: str) -> str:
    """Ask a model."""
    answer = await gen_openai_chat_response(
        messages=[{"role": "user", "content": "Hi"}], model="m", base_url=base_url, max_tokens=50
    )
    return answer.response_content


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "report", "Wake the agent.")
async def report(_ctx: AgentCtx) -> str:
    """Wake the agent."""
    return "news"
