"""`nekro reset`: stop a chat's rounds, start a new history and run the plugins' reset hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nekro.cli.command import Deps, arg, chat_key
from nekro.cli.gateway_client import open_client
from nekro.cli.running import run_async
from nekro.cli.services.system import CALL_LANES, open_services

__all__ = [
    "EPILOG",
    "Args",
    "run",
    "run_over_gateway",
]


EPILOG: Final = """\
examples:
  nekro reset group_1

The chat's rounds are stopped as by `nekro cancel`, a new history begins (`nekro history --all` still shows
the old one), and the plugins' reset hooks run. Calls that wait for approval are withdrawn, and approvals for
the chat or a turn end.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro reset`."""

    chat_key: str = arg(metavar="K", type=chat_key, help="chat")


def run(args: Args, deps: Deps) -> int:
    """Reset the chat."""
    settings = deps.load_settings()

    async def work() -> int:
        from nekro.app import use_cases

        async with open_services(
            settings, command="reset", lanes=CALL_LANES, output=deps.output, needs_workers=False
        ) as (_, services):
            await use_cases.reset_chat(services, args.chat_key)
        deps.output.words(f"chat {args.chat_key} was reset")
        return 0

    return run_async(work())


def run_over_gateway(args: Args, deps: Deps) -> int:
    """Reset the chat."""
    with open_client() as client:
        client.chat(args.chat_key).reset()
    deps.output.words(f"chat {args.chat_key} was reset")
    return 0
