"""`nekro exec`: run a file in the sandbox, like code of the language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nekro.cli.command import Deps, arg, chat_key_option, json_flag, read_text, user_id_option
from nekro.cli.gateway_client import open_client
from nekro.cli.running import run_async
from nekro.cli.services.system import CALL_LANES, ROUND_LANES, open_services
from nekro.cli.views.round_text import describe_run
from nekro_agent.errors import LLMError

if TYPE_CHECKING:
    from nekro.app.rounds.runs import CodeReport
    from nekro.app.services import Services

__all__ = [
    "EPILOG",
    "Args",
    "run",
    "run_over_gateway",
    "show",
    "show_end",
]


EPILOG: Final = """\
examples:
  nekro exec shopping.py --user-id ada
  nekro exec --chat-key group_1 --user-id ada --json shopping.py
  echo 'print(list_notes())' | nekro exec --user-id ada -

Failures of follow-up rounds and jobs are printed and leave the exit code at the stop type of the code.
Exit code = stop type: 0 NORMAL, 1 ERROR, 2 TIMEOUT, 8 AGENT, 9 MANUAL, 10 SECURITY, 11 MULTIMODAL_AGENT,
14 APPROVAL.
When the code did not run at all: 64 command line or setting, 70 internal error, 3 broker, 4 database,
5 plugin, 7 no sandbox, 13 a process did not start.
`--json` prints {stop_type, exit_code, output, calls, follow_ups}.
Over NEKRO_URL a rounds worker of the fleet runs the code, its output is printed as it comes, and Ctrl-C stops
the run.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro exec`."""

    file: Path = arg(metavar="FILE", type=Path, help="Python file; - is stdin")
    chat_key: str = chat_key_option()
    user_id: str | None = user_id_option()
    no_follow_up: bool = arg(
        "--no-follow-up",
        action="store_true",
        help="let AGENT results end the code without scheduling a round",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the file; the exit code is its stop type."""
    settings = deps.load_settings()
    code = read_text(args.file)
    has_model = settings.llm.script is not None or bool(settings.llm.base_url)
    lanes = ROUND_LANES if has_model and not args.no_follow_up else CALL_LANES

    async def work() -> CodeReport:
        from nekro.app import use_cases

        async with open_services(settings, command="exec", lanes=lanes, output=deps.output) as opened:
            system, services = opened
            report = await use_cases.run_code(
                services,
                code,
                chat_key=args.chat_key,
                user_id=args.user_id,
                follow_up=not args.no_follow_up,
                file_name=args.file.name if str(args.file) != "-" else "<stdin>",
            )
            if system.own and report.has_detached:
                await _wait_for_jobs(services, args, deps)
            if report.follow_ups and system.own:
                await _wait_for_follow_ups(services, report, args, deps, has_model=has_model)
            return report

    report = run_async(work())
    from nekro.operations.calls import run_answer

    return show(describe_run(run_answer("", report)), report.error, args, deps)


def show(described: Mapping[str, Any], error: str | None, args: Args, deps: Deps) -> int:
    """Print the object that ``--json`` prints, or the output; returns the exit code."""
    if args.json:
        deps.output.json(described)
    else:
        if described["output"]:
            deps.output.data(described["output"].rstrip("\n"))
        show_end(described, error, deps)
    return int(described["exit_code"])


def show_end(described: Mapping[str, Any], error: str | None, deps: Deps) -> None:
    """Print why the code stopped."""
    ended = f"{described['stop_type']} after {len(described['calls'])} calls"
    deps.output.words(f"{ended}: {error}" if error else ended)
    for call in described["calls"]:
        if call["awaits_approval"]:
            deps.output.words(
                f"call {call['id']} of {call['method']} waits for approval {call['approval_id']}; "
                "`nekro approvals` decides"
            )


async def _wait_for_jobs(services: Services, args: Args, deps: Deps) -> None:
    """Wait for calls that outlived the code: the workers that run them end with this command."""
    from nekro.cli.views.turns import wait_for_jobs

    deps.output.words(f"waiting for background jobs of chat {args.chat_key}; Ctrl-C abandons them")
    jobs = await wait_for_jobs(
        services.database, args.chat_key, seconds=services.settings.workers.long_timeout_seconds
    )
    for job in jobs:
        if job.state is job.state.FAILED:
            deps.output.words(f"job {job.id} ({job.type}) failed: {job.message}")


async def _wait_for_follow_ups(
    services: Services, report: CodeReport, args: Args, deps: Deps, *, has_model: bool
) -> None:
    """Wait for the follow-up rounds: the workers that run them end with this command."""
    if not has_model:
        deps.output.words(
            f"a follow-up round waits in chat {args.chat_key}; it runs when a rounds worker with a language"
            " model (NEKRO_LLM__BASE_URL) is started"
        )
        return
    from nekro.cli.views.turns import require_success, wait_for_quiet

    seconds = services.settings.agent.turn_seconds
    await wait_for_quiet(services.database, args.chat_key, seconds=seconds)
    for follow_up in report.follow_ups:
        try:
            await require_success(services.database, round_id=follow_up["round_id"])
        except LLMError as exc:
            deps.output.words(f"follow-up of {follow_up['method']}: {exc}")


def run_over_gateway(args: Args, deps: Deps) -> int:
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
