"""`nekro exec`: run a file in the sandbox, like code of the language model."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.api import SystemNeed, is_over_gateway, open_system_api
from nekro.cli.command import Deps, arg, chat_key_option, json_flag, read_text, user_id_option
from nekro.cli.running import run_async
from nekro.cli.services.system import CALL_LANES, ROUND_LANES
from nekro.cli.views.round_text import describe_run
from nekro_agent.errors import LLMError

if TYPE_CHECKING:
    from nekro.app.rounds.runs import CodeReport
    from nekro.app.services import Services
    from nekro.operations.actor import Actor
    from nekro_client.models import Run

__all__ = [
    "EPILOG",
    "Args",
    "run",
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
    code = read_text(args.file)
    report = run_async(_exec(code, args, deps))
    described = describe_run(report)
    if args.json:
        deps.output.json(described)
    else:
        show_end(described, report.error, deps)
    return int(described["exit_code"])


async def _exec(code: str, args: Args, deps: Deps) -> Run:
    """Run the code and print its output; wait for what it started, if the workers end with this command."""
    here = {"stream_run": partial(_run_here, file_name=args.file.name)}
    async with open_system_api(deps, _needs(args, deps), here=here) as opened:
        async with opened.api.stream_run(
            code, chat_key=args.chat_key, user_id=args.user_id, follow_up=not args.no_follow_up
        ) as run:
            if not args.json:
                await _print(run, deps)
            report = await run.result()
        if opened.own and opened.services is not None and isinstance(run, _EndedRun):
            await _wait_for_rest(opened.services, run.report, args, deps)
    return report


def _needs(args: Args, deps: Deps) -> SystemNeed:
    wakes = not args.no_follow_up and not is_over_gateway() and _has_model(deps.load_settings())
    return SystemNeed(command="exec", lanes=ROUND_LANES if wakes else CALL_LANES, needs_workers=True)


def _has_model(settings: Settings) -> bool:
    return settings.llm.script is not None or bool(settings.llm.base_url)


@dataclass(frozen=True, kw_only=True)
class _EndedRun:
    """A run in this process, in the form of ``AsyncRunStream``: its output is one piece."""

    report: CodeReport

    async def __aiter__(self) -> AsyncIterator[str]:
        yield self.report.output

    async def result(self) -> Run:
        """Return the report as the API does."""
        from nekro.operations.calls import run_answer

        return run_answer("", self.report)


@asynccontextmanager
async def _run_here(
    actor: Actor, code: str, *, chat_key: str, user_id: str | None, follow_up: bool, file_name: str
) -> AsyncIterator[_EndedRun]:
    """Run code in a sandbox of this process."""
    from nekro.app import use_cases

    report = await use_cases.run_code(
        actor.services, code, chat_key=chat_key, user_id=user_id, follow_up=follow_up, file_name=file_name
    )
    yield _EndedRun(report=report)


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


async def _wait_for_rest(services: Services, report: CodeReport, args: Args, deps: Deps) -> None:
    """Wait for jobs and rounds that the code has left: their workers end with this command."""
    if report.has_detached:
        await _wait_for_jobs(services, args, deps)
    if report.follow_ups:
        await _wait_for_follow_ups(services, report, args, deps)


async def _wait_for_jobs(services: Services, args: Args, deps: Deps) -> None:
    from nekro.cli.views.turns import wait_for_jobs

    deps.output.words(f"waiting for background jobs of chat {args.chat_key}; Ctrl-C abandons them")
    jobs = await wait_for_jobs(
        services.database, args.chat_key, seconds=services.settings.workers.long_timeout_seconds
    )
    for job in jobs:
        if job.state is job.state.FAILED:
            deps.output.words(f"job {job.id} ({job.type}) failed: {job.message}")


async def _wait_for_follow_ups(services: Services, report: CodeReport, args: Args, deps: Deps) -> None:
    if not _has_model(services.settings):
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


async def _print(pieces: AsyncIterable[str], deps: Deps) -> None:
    """Print the output as it comes, and one line end after its last line."""
    held, is_open, is_first = "", False, True
    async for piece in pieces:
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
