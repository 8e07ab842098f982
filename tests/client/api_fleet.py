"""A small fleet with a plugin and a model by script, for tests of the API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from worker_fleet import Fleet, build_fleet

__all__ = ["small_fleet"]

PLUGIN = '''
import asyncio
from pathlib import Path
from typing import Annotated, Any

from nekro_agent.api.plugin import Arg, CmdCtl, CommandExecutionContext, CommandPermission
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.api.message import send_text

plugin = NekroPlugin("Desk", "desk", "Answers", "1.0", "tests", "")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "add")
async def add(_ctx: AgentCtx, first: int, second: int = 1) -> int:
    """Add two numbers."""
    return first + second


@plugin.mount_command(name="order", description="Order a dish", usage="order [dish]")
async def order(
    context: CommandExecutionContext, dish: Annotated[str, Arg("dish", positional=True)] = ""
) -> Any:
    if dish:
        yield CmdCtl.success(f"{dish} for {context.user_id or 'a guest'}")
    else:
        yield CmdCtl.wait("which dish?", callback_cmd="order", timeout=60)


@plugin.mount_command(name="close", description="Close", permission=CommandPermission.SUPER_USER)
async def close(context: CommandExecutionContext) -> Any:
    yield CmdCtl.failed("nothing is open")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fail")
async def fail(_ctx: AgentCtx) -> None:
    """Fail."""
    raise ValueError("on purpose")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "measure")
async def measure(_ctx: AgentCtx) -> int:
    """Report progress, which is listed as a job."""
    _ctx.report_progress(50, "half")
    return 1


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "hold")
async def hold(_ctx: AgentCtx, name: str) -> None:
    """Wait for a file beside the plugin."""
    while not (Path(__file__).parent / f"{_ctx.chat_key}-{name}").exists():
        await asyncio.sleep(0.02)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "refund", requires_approval=True)
async def refund(_ctx: AgentCtx, name: str, amount: int = 1) -> str:
    """Pay somebody."""
    return f"paid {name} {amount}"


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "ask")
async def ask(_ctx: AgentCtx, text: str) -> str:
    """Ask the agent."""
    return text


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "say")
async def say(_ctx: AgentCtx, text: str) -> str:
    """Say a text."""
    await send_text(_ctx.chat_key, text, _ctx)
    return "said"
'''
SCRIPT = r"""
- when: 'wait long'
  answer: |
    ```python
    import time
    time.sleep(60)
    ```
- when: 'count slowly'
  answer: |
    ```python
    hold("first")
    print("one")
    hold("second")
    print("two", end="")
    ```
- when: 'finish now'
  answer: |
    ```python
    ```
- when: 'trace all'
  answer: |
    ```python
    say("noted")
    add(1)
    try:
        fail()
    except Exception:
        print("failed")
    ask("finish now")
    ```
- when: '(?s).*\bsay (\w+)'
  answer: |
    ```python
    say("you said ${1}")
    print(add(1, second=2))
    ```
- when: 'hello|more|tool|said'
  answer: ''
"""


def small_fleet(
    directory: Path,
    redis_url: str,
    *,
    load_shipped: bool = False,
    more_plugins: Mapping[str, str] = MappingProxyType({}),
    lanes: Sequence[str] = ("methods", "rounds"),
    **settings: Any,
) -> Iterator[Fleet]:
    """Workers of the lanes that a turn needs, until the generator is closed."""
    (directory / "plugins").mkdir()
    for name, source in more_plugins.items():
        (directory / "plugins" / f"{name}.py").write_text(source, "utf-8")
    (directory / "plugins" / "desk.py").write_text(PLUGIN, "utf-8")
    script = directory / "script.yaml"
    script.write_text(SCRIPT, "utf-8")
    fleet = build_fleet(
        directory,
        redis_url,
        f"sqlite:///{directory / 'nekro.db'}",
        plugins={"dirs": (directory / "plugins",), "load_shipped": load_shipped},
        llm={"script": script},
        **{"agent": {"debounce_seconds": 0}, **settings},
    )
    try:
        fleet.start(*lanes)
        yield fleet
    finally:
        fleet.stop()
