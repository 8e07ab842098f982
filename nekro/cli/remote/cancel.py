"""`nekro cancel` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands.cancel import Args, show
from nekro.cli.remote.target import open_client

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Stop the chat's rounds."""
    with open_client() as client:
        stopped = client.chat(args.chat_key).cancel(wait=args.seconds)
    show(stopped.model_dump(), args, deps)
    return 0
