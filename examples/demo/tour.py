"""Run the scenes one after the other and collect their records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from nekro.app import use_cases
from nekro.cli.services.process import START_SECONDS
from nekro.cli.views.turns import newest_rounds, wait_for_jobs, wait_for_quiet
from nekro.sandbox.packages.base import named_packages

from . import scenes
from .points import NO_PACKAGES, Evidence, gather
from .stage import Stage

if TYPE_CHECKING:
    from nekro.app.chats.attachments import Attachment

__all__ = ["play"]

_PLAN_TRIES: Final = 6


async def play(stage: Stage, *, say: Callable[[str], None]) -> Evidence:
    """Run every scene in one chat.

    Raises:
        ServiceError: a scene does not end.
    """
    models = stage.models
    chat_key = await _plan(stage, say)
    await _scene(stage, chat_key, scenes.ASK_DRAW, say)
    await _scene(stage, chat_key, scenes.ASK_FETCH.format(url=models.url, sha256=models.sha256), say)
    say("(the code has ended, the download continues as a job)")
    await wait_for_jobs(stage.services.database, chat_key, seconds=START_SECONDS)
    say("(the methods worker stops, another one replaces it)")
    await stage.replace("methods-1", "methods-2")
    await _scene(stage, chat_key, scenes.ASK_GREET, say)
    await asyncio.to_thread(stage.tasks.wait_for, "get_preference", seconds=START_SECONDS)
    if named_packages(stage.settings.sandbox):
        await _chart(stage, chat_key, say)
    else:
        say(f"(no chart: {NO_PACKAGES})")
    return await gather(stage, chat_key)


async def _plan(stage: Stage, say: Callable[[str], None]) -> str:
    """Repeat the first scene until the other rounds worker takes its follow-up round; returns the chat.

    Any worker may take any round: the idle one usually does, but that is not guaranteed.
    """
    for _ in range(_PLAN_TRIES):
        chat_key = f"demo-{uuid4().hex[:8]}"
        await _scene(stage, chat_key, scenes.ASK_PLAN, say)
        rounds = await newest_rounds(stage.services.database, chat_key, limit=2)
        if len({entry.worker for entry in rounds}) > 1:
            break
        say("(one worker ran both rounds; once more, to see the other one run the second)")
    return chat_key


async def _chart(stage: Stage, chat_key: str, say: Callable[[str], None]) -> None:
    files = stage.services.files_of(await stage.services.chat(chat_key))
    table = await asyncio.to_thread(files.add, "takings.csv", scenes.TAKINGS.encode())
    await _scene(stage, chat_key, scenes.ASK_CHART.format(path=table.path), say, files=(table,))


async def _scene(
    stage: Stage, chat_key: str, text: str, say: Callable[[str], None], *, files: Sequence[Attachment] = ()
) -> None:
    say(f"Ada: {text}")
    await use_cases.receive_message(
        stage.services, chat_key, text, user_id=scenes.ADA, user_name="Ada", files=files
    )
    await wait_for_quiet(stage.services.database, chat_key, seconds=START_SECONDS)
