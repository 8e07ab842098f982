"""Bytes, nested containers and Literal annotations as arguments and results."""

import hashlib
from typing import Any, Dict, List, Literal, Optional, TypedDict

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="字节", module_name="bytes_arguments", description="d", version="0.1.0", author="Ada", url="u"
)


class Digest(TypedDict):
    name: str
    sha256: str


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "计算摘要")
async def digest_files(_ctx: AgentCtx, files: Dict[str, bytes], limit: Optional[int] = None) -> List[Digest]:
    """Digest files by name."""
    names = sorted(files)[:limit]
    return [Digest(name=name, sha256=hashlib.sha256(files[name]).hexdigest()) for name in names]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "join")
async def join_bytes(
    _ctx: AgentCtx, parts: List[bytes], how: Literal["plain", "re.versed"] = "plain", **options: Any
) -> bytes:
    """Join bytes."""
    ordered = reversed(parts) if how == "re.versed" else parts
    return options.get("separator", b"").join(ordered)
