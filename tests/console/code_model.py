"""A language model on a real port whose code is what the person wrote.

A message has one or more fenced blocks of Python; the first round of its turn runs the first, and so on.
Without a block the model says that it heard the message.
"""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

from chat_server import ChatServer, SeenRequest, send_chunk, send_event, start_stream, stream
from waiting import WAIT_SECONDS

__all__ = ["STORY", "UNREPORTED", "CodeModel"]

#: A message with it is answered in words, which go on while requests have to wait.
STORY = "Tell a story"
#: A message with it is answered without usage.
UNREPORTED = "Count nothing"

_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_CHARS = 40


class CodeModel:
    """Serves until ``stop``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._server = ChatServer([self._behave])
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._free = asyncio.Event()
        self._free.set()
        #: Requests that wait for ``release``.
        self.waiting = 0

    def start(self) -> str:
        """Start; returns the base URL."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.__aenter__(), self._loop).result(WAIT_SECONDS)
        return self._server.base_url

    def hold(self) -> None:
        """Let requests wait."""
        asyncio.run_coroutine_threadsafe(self._let(is_free=False), self._loop).result(WAIT_SECONDS)

    def release(self) -> None:
        """Answer the requests that wait."""
        asyncio.run_coroutine_threadsafe(self._let(is_free=True), self._loop).result(WAIT_SECONDS)

    def stop(self) -> None:
        """Stop."""
        asyncio.run_coroutine_threadsafe(self._server.__aexit__(), self._loop).result(WAIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    async def _let(self, *, is_free: bool) -> None:
        if is_free:
            self._free.set()
        else:
            self._free.clear()

    async def _behave(self, writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        newest = _text(request.body["messages"][-1]["content"])
        if STORY in newest:
            await self._tell(writer, request)
            return
        self.waiting += 1
        await self._free.wait()
        self.waiting -= 1
        answer = _answer(request.body["messages"])
        pieces = [answer[at : at + _CHARS] for at in range(0, len(answer), _CHARS)]
        await stream(*pieces, usage=UNREPORTED not in newest)(writer, request)

    async def _tell(self, writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        """Write words until requests need not wait."""
        await start_stream(writer)
        await send_chunk(writer, request, {"content": "Once upon a time there was a cook"})
        while not self._free.is_set():
            await send_chunk(writer, request, {"content": " and a cook"})
            await asyncio.sleep(0.05)
        await send_chunk(writer, request, {"content": ". The end."}, "stop")
        await send_event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _answer(messages: list[dict[str, Any]]) -> str:
    texts = [(message["role"], _text(message["content"])) for message in messages]
    with_code = [at for at, (role, text) in enumerate(texts) if role == "user" and _BLOCK.search(text)]
    if not with_code:
        return "```python\nsend_msg_text(_ck, 'I heard you.')\n```"
    blocks: list[str] = _BLOCK.findall(texts[with_code[-1]][1])
    done = sum(role == "assistant" for role, _ in texts[with_code[-1] + 1 :])
    if done >= len(blocks):
        return "```python\nprint('nothing more to do')\n```"
    return f"I will do this now.\n\n```python\n{blocks[done]}```"


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")
