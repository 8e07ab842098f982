"""`nekro models`: list and test model groups, choose the one of a chat, and write its summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from broker_config.model_groups import DEFAULT_GROUP, ModelGroup, chat_groups, model_group, model_groups
from broker_config.settings import Settings
from nekro.cli.command import Deps, arg, json_flag
from nekro.cli.local_api import LocalServices, open_database
from nekro.cli.running import ExitCode, run_async
from nekro_agent.errors import ModelGroupError, UsageError

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro models
  nekro models test
  nekro models test cheap --json
  nekro models use group_1 cheap
  nekro models summarise group_1

`test` sends one small request to each group, or to the one named, and costs as much. `use` chooses the group
that answers a chat from its next round on; `default` is that of NEKRO_LLM__…. `--json` prints a list for
`list` and `test`, and {chat_key, group} for `use`. `summarise` writes the summary of a chat's older messages
again, from the messages, with the group of NEKRO_AGENT__SUMMARY_GROUP; `nekro history --summary` shows it.
`--json` prints {chat_key, versions}, the number of versions that were added.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro models`."""

    action: str = arg(
        nargs="?", default="list", choices=("list", "test", "use", "summarise"), help="default: list"
    )
    names: list[str] = arg(
        nargs="*", metavar="NAME", help="test: a group; use: a chat and a group; summarise: a chat"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    counts = {"list": (0,), "test": (0, 1), "use": (2,), "summarise": (1,)}
    if len(args.names) not in counts[args.action]:
        raise UsageError(
            "write `nekro models list`, `nekro models test [GROUP]`, `nekro models use CHAT GROUP` or "
            "`nekro models summarise CHAT`"
        )
    settings = deps.load_settings()
    if args.action == "list":
        return _list(args, deps, settings)
    work = {"test": _test, "use": _use, "summarise": _summarise}[args.action]
    return run_async(work(args, deps, settings))


def _list(args: Args, deps: Deps, settings: Settings) -> int:
    groups = [_shown(group) for group in model_groups(settings).values()]
    if args.json:
        deps.output.json(groups)
        return ExitCode.OK
    rows = [
        (group["group"], group["model"], group["protocol"], group["kind"], "yes" if group["vision"] else "no",
         ", ".join(group["fallbacks"]))
        for group in groups
    ]  # fmt: skip
    deps.output.table(("GROUP", "MODEL", "PROTOCOL", "KIND", "VISION", "FALLBACKS"), rows)
    return ExitCode.OK


def _shown(group: ModelGroup) -> dict[str, Any]:
    return {
        "group": group.name,
        "model": group.model,
        "protocol": group.protocol,
        "kind": "embedding" if group.embedding else "draw" if group.draw else "chat",
        "vision": group.vision,
        "context_tokens": group.context_tokens,
        "input_price": group.input_price,
        "cached_input_price": group.cached_input_price,
        "output_price": group.output_price,
        "fallbacks": list(group.fallbacks),
    }


async def _test(args: Args, deps: Deps, settings: Settings) -> int:
    from nekro.agent.llm.trial import try_group

    if args.names:
        groups = [model_group(settings, args.names[0])]
        if groups[0].draw:
            raise UsageError(f"model group {groups[0].name} draws for plugins; only plugins can try it")
    else:
        groups = [group for group in model_groups(settings).values() if not group.draw]
    groups = [group for group in groups if group.base_url and group.model]
    if not groups:
        raise ModelGroupError(
            "no endpoint to test; set NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL, or those of a group"
        )
    results = [await try_group(settings.llm, group) for group in groups]
    if args.json:
        deps.output.json(results)
    else:
        deps.output.table(
            ("GROUP", "MODEL", "PROTOCOL", "KIND", "FIRST TOKEN", "SECONDS", "TOKENS", "RESULT"),
            [_row(result) for result in results],
        )
    return ExitCode.OK if all(result["ok"] for result in results) else ExitCode.LLM


def _row(result: dict[str, object]) -> tuple[object, ...]:
    tokens = [result["input_tokens"], result["output_tokens"]]
    return (
        result["group"],
        result["model"],
        result["protocol"],
        result["kind"],
        "" if result["first_token_seconds"] is None else result["first_token_seconds"],
        result["seconds"],
        " + ".join(str(count) for count in tokens if count is not None)
        + (" (estimated)" if result["tokens_estimated"] else ""),
        _outcome(result),
    )


def _outcome(result: dict[str, object]) -> str:
    if not result["ok"]:
        return f"{result['code']}: {result['error']}"
    quirks = result["quirks"]
    return f"ok; refuses {', '.join(quirks)}" if isinstance(quirks, list) and quirks else "ok"


async def _use(args: Args, deps: Deps, settings: Settings) -> int:
    chat_key, name = args.names
    group = chat_groups(settings, name)[0].name
    async with open_database(settings) as database, database.begin() as transaction:
        await transaction.chats.use_model_group(chat_key, None if group == DEFAULT_GROUP else group)
    if args.json:
        deps.output.json({"chat_key": chat_key, "group": group})
    else:
        deps.output.words(f"chat {chat_key} uses model group {group} from its next round on")
    return ExitCode.OK


async def _summarise(args: Args, deps: Deps, settings: Settings) -> int:
    (chat_key,) = args.names
    if settings.agent.summary_group is None:
        raise UsageError("NEKRO_AGENT__SUMMARY_GROUP names no model group, so there are no summaries; set it")
    async with LocalServices(settings) as services:
        await services.check_database()
        versions = await services.summaries.summarise(chat_key, afresh=True)
    if args.json:
        deps.output.json({"chat_key": chat_key, "versions": versions})
    elif versions:
        deps.output.words(f"summary written; `nekro history {chat_key} --summary` shows it")
    else:
        deps.output.words("nothing written: prompts show the whole history, or another process writes it")
    return ExitCode.OK
