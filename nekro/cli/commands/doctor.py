"""`nekro doctor`: check settings, services, sandbox and plugins, and suggest a fix for each fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pydantic import SecretStr

from broker_config.settings import Settings, known_variables
from nekro.cli.command import Deps, arg, json_flag
from nekro.cli.doctor.checks import run_checks
from nekro.cli.doctor.service_checks import Check, Verdict
from nekro.cli.environment import setting_text, setting_value
from nekro.cli.output import one_line
from nekro.cli.running import ExitCode, run_async
from nekro_agent.errors import SettingsError

__all__ = ["EPILOG", "Args", "list_settings", "run", "show_checks"]

EPILOG: Final = """\
examples:
  nekro doctor
  nekro doctor --settings
  nekro doctor --json

The exit code is that of the first failed check: 2 settings, 1 data directory, 3 Redis, 4 database,
7 sandbox, 5 plugins. Warnings leave it at 0. Nothing is started or migrated.
"""

_MARKS = {Verdict.OK: "✓", Verdict.WARNING: "!", Verdict.FAILED: "✗"}


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro doctor`."""

    settings: bool = arg(
        "--settings", action="store_true", help="list every setting with its value; secrets are masked"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Check, or list the settings."""
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
            Check(name="settings", verdict=Verdict.FAILED, detail=str(exc), code=ExitCode.USAGE)
        ]
    else:
        if args.settings:
            _print_settings(settings, args, deps)
            return ExitCode.OK
        checks = run_async(run_checks(settings))
    show_checks(checks, args, deps)
    return next((check.code for check in checks if check.verdict is Verdict.FAILED), ExitCode.OK)


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
