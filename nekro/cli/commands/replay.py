"""`nekro replay`: run the programs of a turn again with their recorded answers, or ask another model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nekro.cli.api import find, open_api
from nekro.cli.command import Deps, arg, json_flag, not_blank
from nekro.cli.running import run_async
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from nekro.app.rounds.turn_replays import ModelReplay, TurnReplay

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro replay 4f1c2a
  nekro replay 4f1c2a --json
  nekro replay 4f1c2a --save cases/rain.yaml
  nekro replay 4f1c2a --model cheap

Runs the programs of a turn again in a sandbox of this command, with the answers that their calls got: without
a worker, without a request to a model, and without an effect. What the programs read of clocks and their
random numbers are those of the turn; the directory of their files is empty. Prints where a program differs
now: another call, an answer that was not kept (events have at most 4,000 bytes of one), another end or other
output. The beginning of an id is enough; `nekro history CHAT --trace` shows ids. Needs the database and the
signing key: it does not work over NEKRO_URL. Exit code: 0 nothing differs, 1 something does.

`--save` also writes what is recorded to a new file, which `nekro eval` runs; only if nothing differs.
`--model` asks a model group instead, with the kept prompt of each round (NEKRO_AGENT__KEEP_PROMPTS), and
compares what its programs would have done. Its requests cost as those of the chat, on the chat's budgets.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro replay`."""

    turn_id: str = arg(metavar="TURN", type=not_blank, help="id of the turn")
    save: Path | None = arg("--save", metavar="CASE", type=Path, help="new file for `nekro eval`, *.yaml")
    model: str | None = arg(
        "--model", metavar="GROUP", type=not_blank, help="model group to ask instead of the chat's own"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Replay the turn; returns whether something differs."""
    if args.model is not None and args.save is not None:
        raise UsageError(
            "give --save or --model: a case has the programs of the turn, not those of another model"
        )
    replay = run_async(_replay(args, deps))
    _report(args, deps, replay)
    return 0 if replay.is_same else 1


async def _replay(args: Args, deps: Deps) -> TurnReplay | ModelReplay:
    from nekro.app.services import CALLER, Services

    async with open_api(deps, asks_up=False) as api:
        listing = "nekro history CHAT --trace"
        turn_id = await find(api.turns.list, args.turn_id, noun="turn", listing=listing)
    services = Services.load(deps.load_settings(), role=CALLER)
    try:
        async with services.replayer() as replayer:
            if args.model is not None:
                return await replayer.ask(turn_id, args.model)
            replay = await replayer.replay(turn_id)
            if args.save is not None and replay.is_same:
                await replayer.save(replay, args.save)
            return replay
    finally:
        await services.close()


def _report(args: Args, deps: Deps, replay: TurnReplay | ModelReplay) -> None:
    from nekro.app.rounds.turn_replays import ModelReplay
    from nekro.cli.views.replays import asked_json, program_json, show_asked, show_program

    output = deps.output
    if isinstance(replay, ModelReplay):
        if args.json:
            output.json(
                {
                    "turn_id": replay.turn_id,
                    "chat_key": replay.chat_key,
                    "group": replay.group,
                    "is_same": replay.is_same,
                    "rounds": [asked_json(one) for one in replay.rounds],
                    "not_kept": replay.not_kept,
                }
            )
            return
        for asked in replay.rounds:
            show_asked(asked, output)
        for number in replay.not_kept:
            output.report(f"round {number}: its prompt was not kept")
        return
    if args.json:
        output.json(
            {
                "turn_id": replay.turn.turn_id,
                "chat_key": replay.turn.chat_key,
                "is_same": replay.is_same,
                "programs": [program_json(program) for program in replay.programs],
            }
        )
        return
    for program in replay.programs:
        show_program(program, output)
    if not replay.programs:
        output.report("The turn has no program.")
    if args.save is not None:
        output.report(f"saved {args.save}" if replay.is_same else f"not saved, as it differs: {args.save}")
