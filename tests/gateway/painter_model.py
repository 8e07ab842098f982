"""A language model on a real port, in a thread, whose code follows from the newest message's scene."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from typing import Any

from chat_server import ChatServer, SeenRequest, complete, refuse
from waiting import WAIT_SECONDS

__all__ = ["PIXEL", "PainterModel"]

#: A picture of one red pixel.
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
_SCENE = re.compile(r"scene:(\w+)")
#: The path of a file in a prompt: as it is, or as a Python literal.
_FILE = re.compile(r"\[(?:file|image): ('[^']*'|/[^\]]*?)(?: \([^()]*\))?(?:; not shown[^\]]*)?\]\n")
#: Opens each file by the path that the prompt names.
_OPEN = """\
import ast
paths = [ast.literal_eval(mark) if mark[0] == "'" else mark for mark in {marks!r}]
send_msg_text(_ck, repr([(path, len(open(path, 'rb').read())) for path in paths]))
"""
_SCENES = {
    "hello": 'send_msg_text(_ck, "Hello!")\nsend_msg_text(_ck, "How are you?")',
    "draw": (
        "import base64\n"
        f"open('plot.png', 'wb').write(base64.b64decode({base64.b64encode(PIXEL).decode()!r}))\n"
        "send_msg_text(_ck, 'Here it is.')\n"
        "send_msg_file(_ck, 'plot.png')"
    ),
    "silent": "print('nothing to say')",
}


#: Answers in words, and what differs from a complete usage.
_USAGES: dict[str, dict[str, Any]] = {"reported": {}, "unreported": {"completion_tokens": None}}


class PainterModel:
    """Serves until ``stop``. Scene ``slow`` sends one message at once and another after ``release``."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()
        self._server = ChatServer([self._behave])
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> str:
        """Start unless it serves already; returns the base URL."""
        if not self._thread.is_alive():
            self._thread.start()
            asyncio.run_coroutine_threadsafe(self._server.__aenter__(), self._loop).result(WAIT_SECONDS)
        return self._server.base_url

    def release(self) -> None:
        """Let scene ``slow`` go on."""
        self._loop.call_soon_threadsafe(self._released.set)

    def hold(self) -> None:
        """Let scene ``slow`` wait again."""
        self._loop.call_soon_threadsafe(self._released.clear)

    def stop(self) -> None:
        """Stop."""
        asyncio.run_coroutine_threadsafe(self._server.__aexit__(), self._loop).result(WAIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    async def _behave(self, writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        messages = request.body["messages"]
        self.seen.append(request.body)
        scene = _SCENE.findall("\n".join(_text(message["content"]) for message in messages))[-1]
        if scene == "fail":
            await refuse(400, "the model refuses")(writer, request)
            return
        if scene == "half":
            await complete("Half \ud83d of it")(writer, request)
            return
        if scene in _USAGES:
            await complete("Hello.", usage=_USAGES[scene])(writer, request)
            return
        if scene == "slow":
            is_first = not any(message["role"] == "assistant" for message in messages)
            if not is_first:
                await self._released.wait()
            code = 'send_msg_text(_ck, "one")\nexit(9)' if is_first else 'send_msg_text(_ck, "two")'
        elif scene == "look":
            urls = [part["image_url"]["url"] for message in messages for part in _images(message["content"])]
            seen = [url.partition(",")[0] for url in urls]
            code = f'send_msg_text(_ck, "I see {len(seen)}: {" ".join(seen)}")'
        elif scene == "files":
            prompt = "\n".join(_text(message["content"]) for message in messages)
            code = _OPEN.format(marks=_FILE.findall(prompt))
        else:
            code = _SCENES[scene]
        await complete(f"```python\n{code}\n```")(writer, request)


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _images(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [] if isinstance(content, str) else [part for part in content if part["type"] == "image_url"]
