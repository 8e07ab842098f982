"""The peer smolagents: ``python -m benchmarks.agents.smolagents_site PORT MODEL_URL EXECUTOR``.

A `CodeAgent` per chat, which keeps the conversation in memory. The executor is `local`, which interprets the
code in this process, or `docker`, a container with a Jupyter kernel for each agent, where the tools run too.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.agents.site import Agent, serve

__all__ = ["main"]


@asynccontextmanager
async def _opened(model_url: str, executor: str) -> AsyncIterator[Agent]:
    from anyio.to_thread import run_sync
    from smolagents import CodeAgent, FinalAnswerTool, LogLevel, OpenAIModel, tool

    @tool
    def measure(number: int, text: str) -> dict:  # type: ignore[type-arg]
        """Count one further: return the next number and the same text.

        Args:
            number: where to go on.
            text: any text.
        """
        return {"number": number + 1, "text": text}

    @tool
    def report(number: int, text: str) -> str:
        """Report what was found.

        Args:
            number: what was found.
            text: any text.
        """
        return f"found {number} for {text}"

    model = OpenAIModel(model_id="bench", api_base=model_url, api_key="none")
    # Containers are removed by what starts this process.
    agents: dict[str, Any] = {}

    def answer(chat: str, text: str) -> str:
        if chat not in agents:
            agents[chat] = CodeAgent(
                tools=[measure, report],
                model=model,
                executor_type=executor,
                executor_kwargs=_executor_options(executor),
                code_block_tags="markdown",
                verbosity_level=LogLevel.OFF,
                max_steps=4,
            )
        # Each run wraps it for a remote executor; wrapped twice, it never ends a turn.
        agents[chat].tools["final_answer"] = FinalAnswerTool()
        return str(agents[chat].run(text, reset=False))

    async def turn(chat: str, text: str) -> str:
        return await run_sync(answer, chat, text)

    yield turn


def _executor_options(executor: str) -> dict[str, Any]:
    if executor != "docker":
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"build_new_image": False, "port": probe.getsockname()[1]}


def main(port: str, model_url: str, executor: str) -> None:
    """Serve until a signal ends the process."""
    serve(_opened(model_url, executor), port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
