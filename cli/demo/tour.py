"""Plays the scenes, one after the other, and reads back what came of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cli.demo import scenes
from cli.demo.evidence import Evidence, gather
from cli.demo.stage import Stage
from cli.turns import wait_for_quiet

__all__ = ["play"]

#: A scene takes about a second; a minute without an end is a fault, which the points will show.
_SCENE_SECONDS: Final = 60.0


async def play(stage: Stage, chat_key: str, *, say: Callable[[str], None]) -> Evidence:
    """Play every scene in one chat.

    Raises:
        ServiceError: a scene does not end.
    """
    models = stage.models
    await _scene(stage, chat_key, scenes.ASK_PLAN, say)
    await _scene(stage, chat_key, scenes.ASK_DRAW, say)
    await _scene(stage, chat_key, scenes.ASK_FETCH.format(url=models.url, sha256=models.sha256), say)
    say("(the methods worker ends, another one takes over)")
    await stage.replace("methods-1", "methods-2")
    await _scene(stage, chat_key, scenes.ASK_GREET, say)
    return await gather(stage, chat_key)


async def _scene(stage: Stage, chat_key: str, text: str, say: Callable[[str], None]) -> None:
    say(f"Ada: {text}")
    await stage.services.receive_message(chat_key, text, user_id=scenes.ADA, user_name="Ada")
    await wait_for_quiet(stage.services.database, chat_key, seconds=_SCENE_SECONDS)
