"""Plays the tasks of an evaluation on one system, one after the other."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.evaluation.figures import Played
from benchmarks.evaluation.playing import ProgramPlayer
from benchmarks.evaluation.script import ScriptedModel
from benchmarks.evaluation.system import Endpoint, running_system, settings_for
from benchmarks.evaluation.task import Task
from benchmarks.evaluation.tool_playing import ToolPlayer
from broker_config.secret_files import secret_path
from nekro_client import AsyncClient

if TYPE_CHECKING:
    from broker_config.settings import Settings

__all__ = ["Bench", "opened", "play_all"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A running system with the players of its tasks."""

    programs: ProgramPlayer
    tools: ToolPlayer
    #: Methods that both ways can call.
    methods: int

    async def play(self, group: str, task: Task, *, with_tools: bool) -> Played:
        """Play a task both ways, or by programs only."""
        # A key of its own, so that a task may be played again on the same system.
        key = f"eval-{task.name}-{uuid.uuid4().hex[:8]}"
        programs = await self.programs.play(task, chat_key=key)
        tools = await self.tools.play(task, chat_key=f"{key}-tools") if with_tools else None
        return Played(group=group, task=task.name, programs=programs, tools=tools)


@asynccontextmanager
async def opened(
    base: Settings, *, scripted: bool, limit_seconds: float, model_seconds: float = 0.0
) -> AsyncIterator[Bench]:
    """Start a system of the evaluation's own and stop it afterwards.

    Args:
        base: the user's settings.
        scripted: whether the scripted model answers; otherwise that of the settings.
        limit_seconds: longest time of a task.
        model_seconds: what the scripted model takes for each answer.
    """
    model = ScriptedModel(seconds_per_request=model_seconds) if scripted else None
    url = None if model is None else await model.start()
    try:
        with tempfile.TemporaryDirectory(prefix="nekro-eval-") as name:
            settings = settings_for(base, Path(name) / "data", scripted_url=url)
            async with (
                running_system(settings) as gateway,
                AsyncClient(gateway, key=secret_path(settings.data_dir, "api.key").read_text()) as client,
            ):
                methods = await client.methods()
                tools = ToolPlayer(
                    client,
                    settings.data_dir,
                    endpoint=Endpoint.of(settings.llm),
                    methods=methods,
                    model=model,
                    limit_seconds=limit_seconds,
                )
                programs = ProgramPlayer(client, settings.data_dir, model=model, limit_seconds=limit_seconds)
                yield Bench(programs=programs, tools=tools, methods=len(methods))
    finally:
        if model is not None:
            model.stop()


async def play_all(
    bench: Bench,
    groups: Mapping[str, Sequence[Task]],
    *,
    with_tools: bool,
    said: Callable[[Played], None],
) -> list[Played]:
    """Play all tasks.

    Args:
        said: called after each task.
    """
    played = []
    for group, tasks in groups.items():
        for task in tasks:
            played.append(await bench.play(group, task, with_tools=with_tools))
            said(played[-1])
    return played
