"""`nekro methods` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands.methods import Args, show_list
from nekro.cli.remote.target import open_client
from nekro_agent.errors import UsageError
from nekro_client.models import Method

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """List the methods that code may call."""
    if len(args.words) > 1 or args.words[:1] in (["pin"], ["unpin"]):
        raise UsageError(
            "lanes are not set over a gateway; run `nekro methods pin` where the workers' settings are"
        )
    text = args.words[0] if args.words else ""
    with open_client() as client:
        methods = [method for method in client.methods() if text in method.task]
    show_list([_describe(method) for method in methods], args, deps)
    return 0


def _describe(method: Method) -> dict[str, str | None]:
    names = {"name", "task", "plugin", "type", "lane", "signature", "doc"}
    overridden = set() if method.lane_reason is None else {"lane_reason"}
    return method.model_dump(include=names | overridden)
