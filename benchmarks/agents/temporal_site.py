"""The peer Temporal: ``python -m benchmarks.agents.temporal_site PORT MODEL_URL ADDRESS``.

A workflow per chat, which gets each message as an update; the model's requests and the runs of code, each in
a subprocess, are activities. The worker is in the process of the HTTP server.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.client import Client, WithStartWorkflowOperation
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from benchmarks.agents.code_process import block_of, run_code
from benchmarks.agents.methods import SYSTEM, TOOLS
from benchmarks.agents.site import Agent, serve

__all__ = ["Activities", "ChatWorkflow", "main"]

_QUEUE = "bench"
_ACTIVITY = timedelta(seconds=60)
_START_SECONDS = 30.0


class Activities:
    """What may fail and is not repeated by a replay."""

    def __init__(self, model_url: str) -> None:
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(base_url=model_url, api_key="none")

    @activity.defn
    async def ask_model(self, messages: list[dict[str, str]]) -> str:
        """Return the model's next message."""
        sent: Any = [{"role": "system", "content": SYSTEM}, *messages]
        answer = await self._client.chat.completions.create(model="bench", messages=sent)
        return answer.choices[0].message.content or ""

    @activity.defn
    async def run(self, code: str) -> str:
        """Run code and return what it printed; its calls are not activities of their own."""
        return await run_code(code, TOOLS)


@workflow.defn
class ChatWorkflow:
    """A chat."""

    def __init__(self) -> None:
        self._messages: list[dict[str, str]] = []

    @workflow.run
    async def run(self) -> None:
        """Stay open: each message comes as an update."""
        await workflow.wait_condition(lambda: False)

    @workflow.update
    async def say(self, text: str) -> str:
        """Answer a message."""
        self._messages.append({"role": "user", "content": text})
        while True:
            said: str = await workflow.execute_activity(
                "ask_model", self._messages, result_type=str, start_to_close_timeout=_ACTIVITY
            )
            self._messages.append({"role": "assistant", "content": said})
            code = block_of(said)
            if code is None:
                return said
            printed: str = await workflow.execute_activity(
                "run", code, result_type=str, start_to_close_timeout=_ACTIVITY
            )
            self._messages.append({"role": "user", "content": printed})


async def _connected(address: str) -> Client:
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            return await Client.connect(address)
        except RuntimeError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _opened(model_url: str, address: str) -> AsyncIterator[Agent]:
    client, activities = await _connected(address), Activities(model_url)

    async def turn(chat: str, text: str) -> str:
        start: WithStartWorkflowOperation[ChatWorkflow, None] = WithStartWorkflowOperation(
            ChatWorkflow.run,
            id=chat,
            task_queue=_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        return await client.execute_update_with_start_workflow(
            ChatWorkflow.say, text, start_workflow_operation=start
        )

    async with Worker(
        client,
        task_queue=_QUEUE,
        workflows=[ChatWorkflow],
        activities=[activities.ask_model, activities.run],
        # Without the import checks of the default runner, which cost more.
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        yield turn


def main(port: str, model_url: str, address: str) -> None:
    """Serve until a signal ends the process."""
    serve(_opened(model_url, address), port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
