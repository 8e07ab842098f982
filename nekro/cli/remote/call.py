"""`nekro call` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands.call import Args, parse_arguments, show
from nekro.cli.remote.target import open_client

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Call the method and print its value."""
    positional, named = parse_arguments(args.args)
    with open_client() as client:
        call = client.call(
            args.method,
            positional,
            named,
            chat_key=args.chat_key,
            user_id=args.user_id,
            timeout_seconds=args.timeout,
        )
    if call.approval_id is not None:
        deps.output.words(f"call {call.id} waits for approval {call.approval_id}; `nekro approvals` decides")
        return 0
    show(call.model_dump(include={"id", "value", "type", "worker", "duration_ms"}), args, deps)
    return 0
