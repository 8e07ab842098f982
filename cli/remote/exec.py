"""`nekro exec` over a gateway."""

from __future__ import annotations

from cli.command import Deps, read_text
from cli.commands.exec import Args, show
from cli.remote.messages import describe_call
from cli.remote.target import open_client

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Run the file in a sandbox of the fleet; the exit code is its stop type."""
    code = read_text(args.file)
    with open_client() as client:
        report = client.run(
            code, chat_key=args.chat_key, user_id=args.user_id, follow_up=not args.no_follow_up
        )
    described = {
        "stop_type": report.stop_type,
        "exit_code": report.exit_code,
        "output": report.output,
        "calls": [describe_call(call) for call in report.calls],
        "follow_ups": [
            {"method": call.method, "round_id": call.follow_up} for call in report.calls if call.follow_up
        ],
    }
    return show(described, report.error, args, deps)
