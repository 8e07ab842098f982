"""`nekro db`: migrate the database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nekro.cli.command import Deps, arg
from nekro.cli.running import run_async
from nekro_agent.errors import UsageError

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = ""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro db`."""

    action: str = arg(
        choices=["upgrade"],
        help="`upgrade` brings the schema of NEKRO_DATABASE__URL to this version; idempotent",
    )


def run(args: Args, deps: Deps) -> int:
    """Migrate the database."""
    if args.action != "upgrade":
        raise UsageError(f"unknown action {args.action}")
    from broker_config.embedded import resolve_settings
    from nekro.cli.services.system import migrate

    run_async(migrate(resolve_settings(deps.load_settings())))
    deps.output.words("the database schema is up to date")
    return 0
