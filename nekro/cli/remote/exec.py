"""`nekro exec` over a gateway."""

from __future__ import annotations

from collections.abc import Iterable

from nekro.cli.command import Deps, read_text
from nekro.cli.commands.exec import Args, show, show_end
from nekro.cli.remote.target import open_client
from nekro.cli.views.round_text import describe_run

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Run the file in a sandbox of the fleet; the exit code is its stop type."""
    code = read_text(args.file)
    with (
        open_client() as client,
        client.stream_run(
            code, chat_key=args.chat_key, user_id=args.user_id, follow_up=not args.no_follow_up
        ) as pieces,
    ):
        if not args.json:
            _print(pieces, deps)
        report = pieces.result()
    described = describe_run(report)
    if args.json:
        return show(described, report.error, args, deps)
    show_end(described, report.error, deps)
    return int(described["exit_code"])


def _print(pieces: Iterable[str], deps: Deps) -> None:
    """Print the output as it comes, and one line end after its last line."""
    held, is_open, is_first = "", False, True
    for piece in pieces:
        text = held + piece
        lines = text.rstrip("\n")
        held = text[len(lines) :]
        if lines:
            deps.output.piece(lines)
        if held and (lines or is_open or is_first):
            deps.output.piece("\n")
            held, is_open = held[1:], False
        elif lines:
            is_open = True
        is_first = False
    if is_open:
        deps.output.piece("\n")
