"""`nekro doctor`: check settings, services, sandbox and plugins, and suggest a fix for each fault."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import SecretStr

from broker_config.settings import Settings, known_variables
from nekro.cli.api import is_over_gateway, open_api
from nekro.cli.command import Deps, arg, json_flag
from nekro.cli.doctor.checks import run_checks
from nekro.cli.doctor.service_checks import Check, CheckState
from nekro.cli.environment import setting_text, setting_value
from nekro.cli.output import one_line
from nekro.cli.running import ExitCode, exit_code_of, run_async
from nekro_agent.errors import NekroError, SettingsError, UsageError

if TYPE_CHECKING:
    from nekro_client import AsyncClient

__all__ = [
    "EPILOG",
    "Args",
    "list_settings",
    "run",
    "show_checks",
]


EPILOG: Final = """\
examples:
  nekro doctor
  nekro doctor --settings
  nekro doctor --json

The exit code is that of the first failed check: 2 settings, 1 data directory, 3 Redis, 4 database,
7 sandbox, 5 plugins. Warnings leave it at 0. Nothing is started or migrated.
"""

_MARKS = {CheckState.OK: "✓", CheckState.WARNING: "!", CheckState.FAILED: "✗"}


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro doctor`."""

    settings: bool = arg(
        "--settings", action="store_true", help="list every setting with its value; secrets are masked"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Check, or list the settings."""
    if is_over_gateway():
        if args.settings:
            raise UsageError("settings are read where the workers are; unset NEKRO_URL there")
        return _outcome(run_async(_gateway_checks(deps)), args, deps)
    try:
        settings = deps.load_settings()
    except SettingsError as exc:
        if args.settings and args.json:
            raise
        if args.settings:
            # The listing helps to correct an unknown name: print it with the defaults.
            deps.output.error(exc)
            _print_settings(Settings.model_construct(), args, deps)
            return ExitCode.USAGE
        checks: Sequence[Check] = [
            Check(name="settings", verdict=CheckState.FAILED, detail=str(exc), code=ExitCode.USAGE)
        ]
    else:
        if args.settings:
            _print_settings(settings, args, deps)
            return ExitCode.OK
        checks = run_async(run_checks(settings))
    return _outcome(checks, args, deps)


def _outcome(checks: Sequence[Check], args: Args, deps: Deps) -> int:
    """Print the checks; returns the exit code of the first that failed."""
    show_checks(checks, args, deps)
    return next((check.code for check in checks if check.verdict is CheckState.FAILED), ExitCode.OK)


def list_settings(settings: Settings) -> list[dict[str, Any]]:
    """Describe every setting: variable, value, default, description; secrets are masked."""
    listed = []
    for variable, group, field in known_variables():
        value = setting_value(settings, group, variable)
        default = field.get_default(call_default_factory=True)
        listed.append(
            {
                "variable": variable,
                "value": _shown(value),
                "default": _shown(default),
                "changed": value != default,
                "description": field.description or "",
            }
        )
    return listed


def _shown(value: object) -> str:
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else ""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {group.model}" for name, group in value.items())
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    text = setting_text(value)
    if "://" in text and "@" in text:
        from broker_config.urls import without_password

        return without_password(text)
    return text


def _print_settings(settings: Settings, args: Args, deps: Deps) -> None:
    listed = list_settings(settings)
    if args.json:
        deps.output.json(listed)
        return
    rows = [
        (("* " if entry["changed"] else "  ") + entry["variable"], entry["value"], entry["description"])
        for entry in listed
    ]
    deps.output.table(("  VARIABLE", "VALUE", "WHAT IT IS"), rows)
    deps.output.words("* differs from its default; set it in the environment or in ./.env")


def show_checks(checks: Sequence[Check], args: Args, deps: Deps) -> None:
    """Print the checks."""
    if args.json:
        deps.output.json([asdict(check) for check in checks])
        return
    for check in checks:
        fix = f" -> {check.fix}" if check.fix else ""
        deps.output.report(one_line(f"{_MARKS[check.verdict]} {check.name}: {check.detail}{fix}"))


async def _gateway_checks(deps: Deps) -> list[Check]:
    """Check the gateway, the key, the workers, the queues and the plugins."""
    steps: dict[str, Callable[[AsyncClient], Awaitable[str]]] = {
        "gateway": _gateway,
        "plugins": _plugins,
        "workers": _workers,
        "queues": _queues,
    }
    return [await _checked(name, step, deps) for name, step in steps.items()]


async def _checked(name: str, step: Callable[[AsyncClient], Awaitable[str]], deps: Deps) -> Check:
    try:
        async with open_api(deps) as api:
            return Check(name=name, verdict=CheckState.OK, detail=await step(api))
    except _CheckFailedError as exc:
        return Check(name=name, verdict=CheckState.WARNING, detail=str(exc))
    except NekroError as exc:
        is_denied = "scope" in str(exc) and isinstance(exc, UsageError)
        verdict = CheckState.WARNING if is_denied and name != "gateway" else CheckState.FAILED
        return Check(name=name, verdict=verdict, detail=str(exc), code=exit_code_of(exc))


class _CheckFailedError(Exception):
    """The state is one that an operator should know."""


async def _gateway(api: AsyncClient) -> str:
    await api.ready()
    return f"{os.environ['NEKRO_URL']} is ready"


async def _plugins(api: AsyncClient) -> str:
    plugins = await api.plugins()
    failed = [plugin.key for plugin in plugins if plugin.status == "failed"]
    if failed:
        raise _CheckFailedError(f"not loaded: {', '.join(failed)}; `nekro plugins` shows the errors")
    return f"{len(plugins)} plugins"


async def _workers(api: AsyncClient) -> str:
    live = [worker for worker in await api.workers() if worker.is_live]
    lanes = sorted({worker.lane for worker in live})
    if not live:
        raise _CheckFailedError("no worker is live")
    return f"{len(live)} live, for {', '.join(lanes)}"


async def _queues(api: AsyncClient) -> str:
    queues = await api.queues()
    down = [broker.name for broker in queues.brokers if not broker.is_up]
    if down:
        raise _CheckFailedError(f"brokers that do not answer: {', '.join(down)}; their chats wait")
    if queues.dead_letters:
        raise _CheckFailedError(f"{queues.dead_letters} dead letters; `nekro dead` lists them")
    messages = sum(queue.waiting for queue in queues.queues)
    return f"{messages} messages wait, and {queues.programs.waiting} programs without a process"
