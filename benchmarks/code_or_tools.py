"""Compare one program with classic tool calling: ``python -m benchmarks.code_or_tools``.

The same task, a row of calls of plugin methods that each need the result before, is done twice on the
same workers (Redis, SQLite, `methods` and `rounds`): as a turn whose answer is one program, and as a loop of
requests with the methods as tools, one tool call per answer. The model is scripted and takes
`--model-seconds` for each request. Both get the same methods; the system prompt of the tools is two
sentences, that of the program is ours.

Any methods can take part: name them with `--step`, and what the workers need for them in the environment
(`NEKRO_PLUGINS__DIRS`, `NEKRO_MCP__FILE`). An argument `$2` is the result of step 2, `$text2` its text, and
`$chat` the key of the chat:

  python -m benchmarks.code_or_tools --step 'mcp.time.get_current_time {"timezone": "UTC"}' \\
      --step 'nekro.basic.send_msg_text {"chat_key": "$chat", "message_text": "$text1"}'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.harness.figures import percentile
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.served import served
from benchmarks.tool_use.model import CountingModel, Usage
from benchmarks.tool_use.schemas import tool_name, tool_of
from benchmarks.tool_use.steps import STEPS, Step, arguments, program, step_of
from nekro.app import use_cases

if TYPE_CHECKING:
    from nekro.app.services import Services
    from nekro.plugins.entries import MethodEntry

__all__ = ["main", "measure", "parse"]

_CHAT: Final = "bench_chat"
_ASK: Final = "Please do the task that we agreed on."
_DONE: Final = "It is done."
_SYSTEM: Final = "You are a helpful assistant. Use the tools to do what the user asks."
_LONGEST_SECONDS: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way through the task."""

    usage: Usage
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The measured runs of both ways."""

    program: list[Run]
    tools: list[Run]
    tool_count: int


async def measure(
    steps: Sequence[Step], *, repetitions: int, model_seconds: float, warm_up: int = 1
) -> Comparison:
    """Do the task both ways by turns."""
    model = CountingModel(seconds_per_request=model_seconds)
    async with _system(model) as services:
        async with asyncio.timeout(_LONGEST_SECONDS):
            entries = [await _published(services, step.method) for step in steps]
        assert [entry.task for entry in entries] == [step.method for step in steps]
        tools = [tool_of(entry) for entry in services.registry.enabled()]
        found = Comparison(program=[], tools=[], tool_count=len(tools))
        for number in range(warm_up + repetitions):
            async with asyncio.timeout(_LONGEST_SECONDS):
                by_program = await _by_program(services, model, steps)
                by_tools = await _by_tools(services, model, steps, tools)
            if number >= warm_up:
                found.program.append(by_program)
                found.tools.append(by_tools)
    return found


async def _published(services: Services, method: str) -> MethodEntry:
    """Return a method; those of MCP servers are published some seconds after the workers' start."""
    from nekro_agent.durations import POLL_SECONDS
    from nekro_agent.errors import MethodNotFoundError

    while True:
        try:
            return await served(services, method)
        except MethodNotFoundError:
            await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def _system(model: CountingModel) -> AsyncIterator[Services]:
    """Start workers with the model, and the services of a caller."""
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        directory = Path(name)
        os.environ |= {
            "NEKRO_BROKER__URL": server.url,
            "NEKRO_DATA_DIR": str(directory / "data"),
            "NEKRO_LOG__LEVEL": "WARNING",
            "NEKRO_LLM__BASE_URL": await model.start(),
            "NEKRO_LLM__API_KEY": "none",
            "NEKRO_LLM__MODEL": "bench",
            "NEKRO_LLM__STREAM": "false",
        }
        print(describe_machine(server.version), file=sys.stderr)
        nekro = str(Path(sys.executable).with_name("nekro"))
        upgrade = await asyncio.create_subprocess_exec(nekro, "db", "upgrade", stdout=sys.stderr)
        if await upgrade.wait():
            raise SystemExit(f"`nekro db upgrade` ended with exit code {upgrade.returncode}")
        from broker_config.settings import Settings
        from nekro.app.services import CALLER, Services

        lanes = ("methods", "rounds")
        workers = [Child([nekro, "worker", "--lane", lane], log=directory / f"{lane}.log") for lane in lanes]
        services = Services.load(Settings(), role=CALLER)
        try:
            await services.start()
            yield services
        except TimeoutError as exc:
            words = "\n".join(worker.last_words() for worker in workers)
            raise SystemExit(
                f"no method, or no end of a run, within {_LONGEST_SECONDS:g} s:\n{words}"
            ) from exc
        finally:
            await services.close()
            model.stop()
            for worker in workers:
                worker.stop()


async def _by_program(services: Services, model: CountingModel, steps: Sequence[Step]) -> Run:
    """Let a turn do the task: its answer is one program."""
    from nekro.sandbox.models import StopType
    from nekro_agent.durations import POLL_SECONDS
    from storage.states import FINAL_ROUND_STATES

    usage = model.prepare({"content": f"```python\n{program(steps)}\n```"})
    begin = time.perf_counter()
    await use_cases.receive_message(services, _CHAT, _ASK, user_id="bench", user_name="bench")
    while True:
        async with services.database.read() as transaction:
            (newest,) = await transaction.rounds.newest(_CHAT, limit=1)
        if newest.state in FINAL_ROUND_STATES:
            break
        await asyncio.sleep(POLL_SECONDS / 10)
    if newest.stop_type != StopType.NORMAL or len(newest.calls or ()) != len(steps):
        raise SystemExit(f"the program failed: {newest.error or newest.output}")
    return Run(usage=usage, seconds=time.perf_counter() - begin)


async def _by_tools(
    services: Services, model: CountingModel, steps: Sequence[Step], tools: Sequence[dict[str, Any]]
) -> Run:
    """Do the task as a loop of requests, one tool call per answer."""
    import httpx

    usage = model.prepare()
    results: list[Any] = []
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"{_ASK} The chat is {_CHAT}."},
    ]
    begin = time.perf_counter()
    url = f"{os.environ['NEKRO_LLM__BASE_URL']}/chat/completions"
    async with httpx.AsyncClient(trust_env=False, timeout=_LONGEST_SECONDS) as client:
        for step in (*steps, None):
            model.answer_next(_DONE if step is None else _call_of(step, results))
            response = await client.post(url, json={"model": "bench", "messages": messages, "tools": tools})
            message = response.raise_for_status().json()["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls", ()):
                given = json.loads(call["function"]["arguments"])
                results.append(await _result(services, call["function"]["name"].replace("__", "."), given))
                text = json.dumps(results[-1], ensure_ascii=False, default=str)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return Run(usage=usage, seconds=time.perf_counter() - begin)


def _call_of(step: Step, results: Sequence[Any]) -> dict[str, Any]:
    given = json.dumps(arguments(step, results, chat_key=_CHAT), ensure_ascii=False, default=str)
    function = {"name": tool_name(step.method), "arguments": given}
    return {"tool_calls": [{"id": f"call_{len(results)}", "type": "function", "function": function}]}


async def _result(services: Services, method: str, given: dict[str, Any]) -> Any:
    from nekro.wire.values import decode_value

    envelope = await use_cases.invoke(
        services, method, (), given, chat_key=_CHAT, user_id="bench", timeout_seconds=_LONGEST_SECONDS
    )
    if envelope.value is None:
        return envelope.text
    return decode_value(envelope.value, max_bytes=services.settings.sandbox.return_bytes)


def table(found: Comparison) -> str:
    """Return the medians and their ratios as a Markdown table."""
    rows = [
        ("requests to the model", "requests", "d"),
        ("characters read", "prompt_chars", ",.0f"),
        ("characters read that a prompt cache does not have", "new_chars", ",.0f"),
        ("characters written", "answer_chars", ",.0f"),
    ]
    lines = ["| figure (median) | one program | tool calls | ratio |", "|---|---|---|---|"]
    for name, field, form in rows:
        ours, theirs = (
            percentile([getattr(run.usage, field) for run in runs], 50)
            for runs in (found.program, found.tools)
        )
        shown = (format(int(value) if form == "d" else value, form) for value in (ours, theirs))
        lines.append(f"| {name} | {' | '.join(shown)} | {ours / theirs:.2f} |")
    ours, theirs = (percentile([run.seconds for run in runs], 50) for runs in (found.program, found.tools))
    lines.append(f"| seconds | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.code_or_tools",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--step",
        type=step_of,
        action="append",
        metavar="'METHOD {ARGUMENTS}'",
        help="a call of the task, in order (default: five calls of shipped plugins)",
    )
    parser.add_argument("--repetitions", type=int, default=10, help="runs of each way (default: 10)")
    parser.add_argument(
        "--model-seconds", type=float, default=1.0, help="time of each answer of the model (default: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    interrupted_by_sigterm()
    options = parse(argv)
    steps = options.step or STEPS
    found = asyncio.run(measure(steps, repetitions=options.repetitions, model_seconds=options.model_seconds))
    print(f"{len(steps)} calls, {found.tool_count} methods, {options.model_seconds:g} s per request:\n")
    print(table(found))
    if options.json is not None:
        runs = {"program": found.program, "tools": found.tools}
        plain = {
            name: [{**vars(run.usage), "seconds": run.seconds} for run in each] for name, each in runs.items()
        }
        options.json.write_text(json.dumps(plain) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
