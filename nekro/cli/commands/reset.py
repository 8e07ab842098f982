"""`nekro reset`: stop a chat's rounds, start a new history and run the plugins' reset hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nekro.cli.api import SystemNeed, open_api
from nekro.cli.command import Deps, arg, chat_key
from nekro.cli.running import run_async
from nekro.cli.services.system import CALL_LANES

__all__ = [
    "EPILOG",
    "Args",
    "run",
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
    run_async(_reset(args, deps))
    deps.output.words(f"chat {args.chat_key} was reset")
    return 0


async def _reset(args: Args, deps: Deps) -> None:
    # The reset hooks of plugins run on workers.
    async with open_api(deps, system=SystemNeed(command="reset", lanes=CALL_LANES)) as api:
        await api.chat(args.chat_key).reset()
