"""Measure system prompts by the number of methods: ``python -m benchmarks.catalogue``.

The methods are those of the shipped plugins, repeated under other names. For each number: the characters of the
system prompt without and with the budget of the settings, with no method used lately and with five, and the time
to build a prompt: the first one, one whose list is as before, and one whose recent methods have changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from typing import Final

from agent.model import ChatBrief, MethodBrief, PluginBrief
from agent.prompt import PromptBuilder, PromptRequest
from benchmarks.harness.figures import percentile
from benchmarks.harness.machine import describe_machine
from broker_config.settings import AgentSettings, SandboxSettings

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
    first_ms: float
    same_ms: float
    changed_ms: float
    full_first_ms: float


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
    from workers.plugins.loader import load_plugins
    from workers.plugins.registry import LoadedRegistry

    shipped = list(LoadedRegistry(load_plugins(entry_points=False).plugins))
    for turn in count():
        for entry in shipped:
            yield MethodBrief(
                name=f"{entry.name}_{turn}", signature=entry.signature, doc=entry.doc, type=entry.type
            )


def measure(number: int, *, repetitions: int) -> Measured:
    """Measure prompts with so many methods."""
    plugins = plugins_of(number)
    names = [method.name for plugin in plugins for method in plugin.methods]
    full, settings = _builder(0), AgentSettings()
    short = _builder(settings.catalogue_chars)
    written = short._catalogue.write(plugins)
    # Two sets of recent methods by turns: each prompt has another system prompt than the last.
    sets = (names[:_RECENT], names[-_RECENT:])
    turns = iter(range(repetitions))
    return Measured(
        methods=number,
        list_chars=len(full._catalogue.write(plugins).text),
        full_chars=_chars(full, plugins),
        short_chars=_chars(short, plugins),
        recent_chars=_chars(short, plugins, names[:_RECENT]),
        form=written.form.value,
        first_ms=_ms(lambda: _chars(_builder(settings.catalogue_chars), plugins), repetitions),
        same_ms=_ms(lambda: _chars(short, plugins), repetitions),
        changed_ms=_ms(lambda: _chars(short, plugins, sets[next(turns) % 2]), repetitions),
        full_first_ms=_ms(lambda: _chars(_builder(0), plugins), repetitions),
    )


def _builder(chars: int) -> PromptBuilder:
    return PromptBuilder(AgentSettings(catalogue_chars=chars), SandboxSettings())


def _chars(builder: PromptBuilder, plugins: Sequence[PluginBrief], recent: Sequence[str] = ()) -> int:
    request = PromptRequest(
        chat=ChatBrief(chat_key="bench", container_key="bench"), plugins=plugins, injected=(), history=(),
        previous=(), observations=(), number=1, check_word="w", now=datetime.now(UTC), recent=recent,
    )  # fmt: skip
    return len(builder.build(request)[0].text)


def _ms(work: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
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
    print(describe_machine(), file=sys.stderr)
    print(
        f"Budget: {AgentSettings().catalogue_chars} characters. Characters of the system prompt; p50 in ms.\n"
    )
    print(
        "| methods | list | no budget | budget | 5 recent | form | first | same | other recent | no budget, first |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    found = [measure(number, repetitions=options.repetitions) for number in options.methods]
    for one in found:
        times = (one.first_ms, one.same_ms, one.changed_ms, one.full_first_ms)
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
