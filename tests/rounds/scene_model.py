"""A model on a real port, in a thread of the test's process, that answers from one script per chat."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter

from chat_server import ChatServer, SeenRequest, complete
from waiting import WAIT_SECONDS

#: Instead of an answer: keep the request open until ``release``, then use the next one.
HANG = "HANG"
_SCENE = re.compile(r"scene:([\w-]+)")


class SceneModel:
    """Answers a prompt that contains ``scene:<name>`` with the next answer of that scene."""

    def __init__(self) -> None:
        self.scenes: dict[str, list[str]] = {}
        self.asked: Counter[str] = Counter()
        self.prompts: list[str] = []
        self._released: dict[str, asyncio.Event] = {}
        self._loop = asyncio.new_event_loop()
        self._server = ChatServer([self._behave])
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> str:
        """Start to listen unless it does already; returns the base URL."""
        if not self._thread.is_alive():
            self._thread.start()
            asyncio.run_coroutine_threadsafe(self._server.__aenter__(), self._loop).result(WAIT_SECONDS)
        return self._server.base_url

    def rewind(self) -> None:
        """Restart every scene."""
        self.asked.clear()
        self.prompts.clear()
        self._released.clear()

    def stop(self) -> None:
        """Stop the server."""
        asyncio.run_coroutine_threadsafe(self._server.__aexit__(), self._loop).result(WAIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    def release(self, scene: str) -> None:
        """Answer the requests that are kept open."""
        self._loop.call_soon_threadsafe(self._event(scene).set)

    def _event(self, scene: str) -> asyncio.Event:
        return self._released.setdefault(scene, asyncio.Event())

    async def _behave(self, writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        prompt = json.dumps(request.body["messages"], ensure_ascii=False)
        self.prompts.append(prompt)
        found = _SCENE.search(prompt)
        scene = found[1] if found else ""
        answers = self.scenes.get(scene, [""])
        answer = answers[min(self.asked[scene], len(answers) - 1)]
        self.asked[scene] += 1
        if answer == HANG:
            await self._event(scene).wait()
            answer = answers[-1]
        await complete(f"```python\n{answer}\n```")(writer, request)
