"""Plays a task through the system: a person's messages go in over HTTP, what people see comes out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.evaluation.figures import Failure, FailureKind, Run, by_cause
from benchmarks.evaluation.script import Script, ScriptedModel
from benchmarks.evaluation.task import Decision, Delivered, Effect, Said, Seen, Task
from nekro_agent.durations import POLL_SECONDS
from nekro_client import AsyncChat, AsyncClient, ClientError
from nekro_client.models import Approval, FileInfo, FilePart, ImagePart, Round, TurnState

__all__ = ["ProgramPlayer", "effects_of", "failures_of", "scripted", "seen_in_chat", "upload"]

_WAIT_SECONDS: Final = 25.0
_PAGE: Final = 100
_FINAL_CALLS: Final = frozenset({"done", "failed", "unknown", "cancelled"})
_OPEN_TURNS: Final = frozenset({TurnState.WAITING, TurnState.RUNNING})
_RUNNING: Final = frozenset({"requested", "running"})


class ProgramPlayer:
    """Plays tasks one after the other.

    Args:
        data_dir: of the system, for its record of requests and the plugins' logs of effects.
        model: the scripted model; None if a real one answers.
        limit_seconds: longest time of a task.
    """

    def __init__(
        self, client: AsyncClient, data_dir: Path, *, model: ScriptedModel | None, limit_seconds: float
    ) -> None:
        self._client = client
        self._data_dir = data_dir
        self._model = model
        self._limit = limit_seconds

    async def play(self, task: Task, *, chat_key: str) -> Run:
        """Play a task in a new chat; what goes wrong is in the run's failures."""
        chat = self._client.chat(chat_key)
        script = Script(replies=task.model)
        failures: list[Failure] = []
        begin = time.perf_counter()
        with scripted(self._model, script):
            try:
                async with asyncio.timeout(self._limit):
                    await self._talk(chat, task, script)
            except TimeoutError:
                failures.append(Failure(kind=FailureKind.TIME, text=f"no end within {self._limit:g} s"))
                await chat.cancel(wait=_WAIT_SECONDS)
            except ClientError as error:
                failures.append(Failure(kind=FailureKind.ERROR, text=f"{type(error).__name__}: {error}"))
            seconds = time.perf_counter() - begin
        rounds = await _rounds(chat)
        turns = [
            await self._client.turns.get(turn_id) for turn_id in dict.fromkeys(r.turn_id for r in rounds)
        ]
        for turn in turns:
            if turn.error is not None:
                text = f"{turn.error.code}: {turn.error.text}"
                failures.append(Failure(kind=FailureKind.TURN, text=text))
        calls = [call for turn in turns for each in turn.rounds for call in each.calls]
        seen = replace(
            await seen_in_chat(chat),
            effects=effects_of(self._data_dir, chat_key),
            calls=[call.method for call in calls if call.error is None],
        )
        return Run(
            seconds=seconds,
            rounds=len(rounds),
            requests=self._requests(chat_key),
            prompt_tokens=sum(one.prompt_tokens or 0 for one in rounds),
            completion_tokens=sum(one.completion_tokens or 0 for one in rounds),
            cost=sum(one.cost or 0.0 for one in rounds),
            new_tokens=script.new_tokens if self._model else None,
            failures=by_cause([*failures_of(task, seen, script if self._model else None), *failures]),
        )

    async def _talk(self, chat: AsyncChat, task: Task, script: Script) -> None:
        decisions = iter(task.decisions)
        for said in task.person:
            stored = await upload(chat, said)
            script.newest = said.text
            posted = await chat.send(
                said.text, stored=stored, user_id=chat.key, user_name="Ada", wait=_WAIT_SECONDS
            )
            turn = posted.turn
            while turn is not None and turn.state in _OPEN_TURNS and not (turn.waits_for or turn.waits):
                turn = await self._client.turns.wait(turn.id)
            await self._settle(chat, decisions, jobs_go_on=said.jobs_go_on)

    async def _settle(self, chat: AsyncChat, decisions: Iterator[Decision], *, jobs_go_on: bool) -> None:
        """Decide what waits for the person, until nothing of the chat is under way."""
        while True:
            approvals = (await self._client.approvals.list(chat_key=chat.key)).items
            for approval in approvals:
                if approval.state == "pending":
                    await self._decide(approval, next(decisions, None))
            jobs = (await self._client.jobs.list(chat_key=chat.key, open_only=True)).items
            # Last, because what ends requests its round before it has ended.
            rounds = await _rounds(chat)
            if (
                not any([await self._is_open(approval) for approval in approvals])
                and (jobs_go_on or not jobs)
                and not any(one.state in _RUNNING for one in rounds)
            ):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _decide(self, approval: Approval, decision: Decision | None) -> None:
        if decision is None or not decision.is_approved:
            reason = "the person did not expect this call" if decision is None else decision.reason
            await self._client.approvals.deny(approval.id, reason=reason)
            return
        await self._client.approvals.approve(
            approval.id,
            scope="turn" if decision.scope == "turn" else "once",
            kwargs=decision.kwargs,
        )

    async def _is_open(self, approval: Approval) -> bool:
        """Whether a request waits for the person, or its call for a worker."""
        if approval.state != "approved":
            return approval.state == "pending"
        return (await self._client.approvals.get(approval.id)).call_state not in _FINAL_CALLS

    def _requests(self, chat_key: str) -> int:
        """Return how many requests the system sent to the model for a chat, repetitions included."""
        record = self._data_dir / "requests.jsonl"
        if not record.exists():
            return 0
        lines = record.read_text("utf-8").split("\n")
        return sum(json.loads(line)["chat_key"] == chat_key for line in lines if line)


@contextmanager
def scripted(model: ScriptedModel | None, script: Script) -> Iterator[None]:
    """Give a script to the scripted model for a block; without such a model it does nothing."""
    if model is None:
        yield
        return
    model.script = script
    try:
        yield
    finally:
        model.script = None


async def upload(chat: AsyncChat, said: Said) -> list[FileInfo]:
    """Store the files of a message in its chat."""
    return [await chat.files.upload(content, name=name) for name, content in said.files.items()]


async def seen_in_chat(chat: AsyncChat) -> Seen:
    """Return the texts and files that the agent sent to a chat, oldest first."""
    page = await chat.messages(limit=_PAGE)
    sent = [message for message in reversed(page.items) if message.kind == "assistant"]
    parts = [part for message in sent for part in message.parts if isinstance(part, (FilePart, ImagePart))]
    files = [
        Delivered(
            name=part.file.name,
            media_type=part.file.media_type,
            content=await chat.files.read(part.file.id),
        )
        for part in parts
    ]
    return Seen(texts=[message.text for message in sent if message.text], files=files)


def effects_of(data_dir: Path, chat_key: str) -> list[Effect]:
    """Return what the evaluation's plugins did for a chat, from the logs that they write."""
    found = []
    for log in sorted((data_dir / "plugins").glob("*/effects.jsonl")):
        for line in log.read_text("utf-8").split("\n"):
            entry = json.loads(line) if line else {}
            if entry.get("chat_key") == chat_key:
                found.append(Effect(kind=entry["kind"], fields=entry["fields"]))
    return found


def failures_of(task: Task, seen: Seen, script: Script | None) -> list[Failure]:
    """Return what is wrong with a task that was played.

    Args:
        script: None if a real model answered.
    """
    failures = []
    if script is not None:
        failures += [Failure(kind=FailureKind.PROMPT, text=fault) for fault in script.faults]
        if script.left and not script.faults:
            text = f"{script.left} of {len(script.replies)} answers were not asked for"
            failures.append(Failure(kind=FailureKind.UNUSED, text=text))
    found = [check(seen) for check in task.outcome]
    return failures + [Failure(kind=FailureKind.OUTCOME, text=text) for text in found if text is not None]


async def _rounds(chat: AsyncChat) -> list[Round]:
    """Return the rounds of a chat that ran or will run, the newest first."""
    page = await chat.rounds(limit=_PAGE)
    return [one for one in page.items if one.merged_into is None]
