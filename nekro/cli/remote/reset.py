"""`nekro reset` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands.reset import Args
from nekro.cli.remote.target import open_client

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Reset the chat."""
    with open_client() as client:
        client.chat(args.chat_key).reset()
    deps.output.words(f"chat {args.chat_key} was reset")
    return 0
