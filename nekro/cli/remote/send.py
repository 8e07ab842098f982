"""`nekro send` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands.send import Args, show_answers
from nekro.cli.output import PartialError
from nekro.cli.remote.messages import describe_message, failure_of
from nekro.cli.remote.target import open_client
from nekro_agent.errors import UsageError

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Send the message; with ``--wait`` until its turn has ended."""
    if not args.text.strip() and not args.files:
        raise UsageError("the message is empty; write a text or --file PATH")
    stated = {"--adapter": args.adapter, "--channel-id": args.channel_id, "--channel-type": args.channel_type,
              "--channel-name": args.channel_name}  # fmt: skip
    for option, value in stated.items():
        if value is not None:
            raise UsageError(f"{option} is not stated over a gateway; the chat key names adapter and channel")
    with open_client() as client:
        posted = client.chat(args.chat_key).send(
            args.text or None,
            files=args.files,
            user_id=args.user_id,
            user_name=args.user_name,
            to_agent=not args.overheard,
        )
        if posted.message is None:
            raise UsageError(f"a plugin's hook blocks messages of {args.user_id}; nothing was recorded")
        turn = client.turns.wait(posted.turn_id) if args.wait and posted.turn_id else None
    answers = [message for message in turn.messages if message.kind == "assistant"] if turn else []
    shown = [describe_message(answer) for answer in answers]
    described = {"id": posted.message.id, "answers": shown}
    failure = None if turn is None else failure_of(turn)
    if args.json and failure is None:
        deps.output.json(described)
    if not (args.json or args.wait):
        deps.output.data(posted.message.id)
    if not args.json:
        show_answers(shown, deps)
    if failure is not None:
        raise PartialError(failure, described)
    return 0
