"""Measure system prompts by the number of methods: ``python -m benchmarks.catalogue``.

The methods are those of the shipped plugins, repeated under other names. For each number: the characters
of the system prompt without and with the budget of the settings, with no method used lately and with five,
and the CPU time to build a prompt: of another list than before, of the same one, and of the same one with
recent methods that were not seen before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count, cycle, islice
from pathlib import Path
from typing import Final

from benchmarks.harness.figures import percentile
from benchmarks.harness.machine import describe_machine
from broker_config.settings import AgentSettings, SandboxSettings
from nekro.agent.model import ChatBrief, MethodBrief, PluginBrief
from nekro.agent.prompt import PromptBuilder, PromptRequest

__all__ = ["main", "parse", "plugins_of"]

_METHODS_PER_PLUGIN: Final = 5
_RECENT: Final = 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of one number of methods; times in milliseconds."""

    methods: int
    list_chars: int
    full_chars: int
    short_chars: int
    recent_chars: int
    form: str
    other_ms: float
    same_ms: float
    unseen_ms: float
    full_other_ms: float


def plugins_of(number: int) -> list[PluginBrief]:
    """Return plugins with so many methods in all, five in each."""
    methods = list(islice(_methods(), number))
    starts = range(0, number, _METHODS_PER_PLUGIN)
    return [
        PluginBrief(
            key=f"bench.plugin_{at}",
            name=f"Plugin {at}",
            module_name=f"plugin_{at}",
            methods=methods[at : at + _METHODS_PER_PLUGIN],
        )
        for at in starts
    ]


def _methods() -> Iterator[MethodBrief]:
    from nekro.plugins.loader import load_plugins
    from nekro.plugins.registry import LoadedRegistry

    shipped = list(LoadedRegistry(load_plugins(entry_points=False).plugins))
    for turn in count():
        for entry in shipped:
            yield MethodBrief(
                name=f"{entry.name}_{turn}", signature=entry.signature, doc=entry.doc, type=entry.type
            )


def measure(number: int, *, repetitions: int) -> Measured:
    """Measure prompts with so many methods."""
    plugins = plugins_of(number)
    others = [replace(plugin, name=f"Other {plugin.name}") for plugin in plugins]
    names = [method.name for plugin in plugins for method in plugin.methods]
    full, settings = _builder(0), AgentSettings()
    short = _builder(settings.catalogue_tokens)
    by_turns, full_by_turns, unseen = cycle((others, plugins)), cycle((others, plugins)), count()

    def with_unseen() -> int:
        start = next(unseen) % number
        return _chars(short, plugins, [*names[start:], *names[:start]][:_RECENT])

    return Measured(
        methods=number,
        list_chars=len(full._catalogue.write(plugins, full._room).text),
        full_chars=_chars(full, plugins),
        short_chars=_chars(short, plugins),
        recent_chars=_chars(short, plugins, names[:_RECENT]),
        form=short._catalogue.write(plugins, short._room).form.value,
        other_ms=_ms(lambda: _chars(short, next(by_turns)), repetitions),
        same_ms=_ms(lambda: _chars(short, plugins), repetitions),
        unseen_ms=_ms(with_unseen, repetitions),
        full_other_ms=_ms(lambda: _chars(full, next(full_by_turns)), repetitions),
    )


def _builder(tokens: int) -> PromptBuilder:
    return PromptBuilder(AgentSettings(catalogue_tokens=tokens, prompt_tokens=1_000_000), SandboxSettings())


def _chars(builder: PromptBuilder, plugins: Sequence[PluginBrief], recent: Sequence[str] = ()) -> int:
    request = PromptRequest(
        chat=ChatBrief(chat_key="bench", container_key="bench"), plugins=plugins, injected=(), history=(),
        previous=(), observations=(), number=1, check_word="w", now=datetime.now(UTC), recent=recent,
    )  # fmt: skip
    return len(builder.build(request)[0].text)


def _ms(work: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return percentile(seconds, 50) * 1e3


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.catalogue", description=__doc__)
    parser.add_argument(
        "--methods", type=int, nargs="+", default=[5, 70, 300], metavar="N", help="default: 5 70 300"
    )
    parser.add_argument("--repetitions", type=int, default=50, help="prompts per time (default: 50)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a Markdown table."""
    options = parse(argv)
    print(describe_machine("not used"), file=sys.stderr)
    budget = AgentSettings().catalogue_tokens
    print(f"Budget: {budget} tokens. Characters of the system prompt; p50 of CPU time in ms.\n")
    heads = ("methods", "list", "no budget", "budget", "5 recent", "form")
    times_of = ("other list, no budget", "other list", "same list", "other recent")
    print(f"| {' | '.join((*heads, *times_of))} |")
    print("|---" * (len(heads) + len(times_of)) + "|")
    found = [measure(number, repetitions=options.repetitions) for number in options.methods]
    for one in found:
        times = (one.full_other_ms, one.other_ms, one.same_ms, one.unseen_ms)
        chars = (one.list_chars, one.full_chars, one.short_chars, one.recent_chars)
        print(
            f"| {one.methods} | {' | '.join(f'{value:,}' for value in chars)} | {one.form} | "
            f"{' | '.join(f'{value:.2f}' for value in times)} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([vars(one) for one in found]) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
