"""Plays a task by classic tool calling: a loop of requests with the methods as tools, on the same workers.

Each call runs the same method of the same plugin over the HTTP API, in a chat whose agent is silenced.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.evaluation.figures import Failure, FailureKind, Run, by_cause
from benchmarks.evaluation.playing import effects_of, failures_of, scripted, seen_in_chat, upload
from benchmarks.evaluation.script import Script, ScriptedModel
from benchmarks.evaluation.system import Endpoint
from benchmarks.evaluation.task import Decision, Said, Task
from benchmarks.tool_use.schemas import tool_name, tool_of
from nekro_client import ApiError, AsyncChat, AsyncClient, ClientError
from nekro_client.models import FileInfo, Method

__all__ = ["LEFT_OUT", "ToolPlayer"]

#: Methods that a tool calling agent does not need: its answers in words are its messages, and every result
#: is shown to it.
LEFT_OUT: Final = frozenset({"nekro.basic.send_msg_text", "nekro.basic.view_str_content"})
_SYSTEM: Final = (
    "You are a helpful assistant in a chat. Use the tools to do what the user asks, then answer in words. "
    "The chat is {chat}."
)
_MOST_REQUESTS: Final = 25
_MILLION: Final = 1_000_000


@dataclass(kw_only=True)
class _Loop:
    """One task under way."""

    chat: AsyncChat
    decisions: Iterator[Decision]
    messages: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ToolPlayer:
    """Plays tasks one after the other; arguments as ``ProgramPlayer``."""

    def __init__(
        self,
        client: AsyncClient,
        data_dir: Path,
        *,
        endpoint: Endpoint,
        methods: Sequence[Method],
        model: ScriptedModel | None,
        limit_seconds: float,
    ) -> None:
        self._client = client
        self._data_dir = data_dir
        self._endpoint = endpoint
        self._model = model
        self._limit = limit_seconds
        offered = [method for method in methods if method.task not in LEFT_OUT]
        self._methods = {name: method for method in offered for name in (tool_name(method.task), method.name)}
        self._tools = [tool_of(method) for method in offered]

    async def play(self, task: Task, *, chat_key: str) -> Run:
        """Play a task in a new chat; what goes wrong is in the run's failures."""
        chat = self._client.chat(chat_key)
        replies = [self._with_full_name(reply) for reply in task.tools]
        script = Script(replies=replies, groups={"chat": chat_key})
        loop = _Loop(chat=chat, decisions=iter(task.decisions))
        failures: list[Failure] = []
        await self._client.command(chat_key, "/eval_silence", user_id=chat_key)
        begin = time.perf_counter()
        with scripted(self._model, script):
            try:
                async with asyncio.timeout(self._limit):
                    await self._talk(loop, task, script)
            except TimeoutError:
                failures.append(Failure(kind=FailureKind.TIME, text=f"no end within {self._limit:g} s"))
            except (ClientError, httpx.HTTPError, _TooManyRequestsError) as error:
                failures.append(Failure(kind=FailureKind.ERROR, text=f"{type(error).__name__}: {error}"))
        seconds = time.perf_counter() - begin
        seen = await seen_in_chat(chat)
        seen = replace(
            seen,
            texts=[*seen.texts, *loop.texts],
            effects=effects_of(self._data_dir, chat_key),
            calls=loop.calls,
        )
        price = self._endpoint
        cost = loop.prompt_tokens * price.input_price + loop.completion_tokens * price.output_price
        return Run(
            seconds=seconds,
            rounds=loop.requests,
            requests=loop.requests,
            prompt_tokens=loop.prompt_tokens,
            completion_tokens=loop.completion_tokens,
            cost=cost / _MILLION,
            new_tokens=script.new_tokens if self._model else None,
            failures=by_cause([*failures_of(task, seen, script if self._model else None), *failures]),
        )

    def _with_full_name(self, reply: Any) -> Any:
        """Return a reply whose tool has the name under which it is offered."""
        if reply.tool is None:
            return reply
        return replace(reply, tool=tool_name(self._methods[reply.tool].task))

    async def _talk(self, loop: _Loop, task: Task, script: Script) -> None:
        loop.messages = [{"role": "system", "content": _SYSTEM.format(chat=loop.chat.key)}]
        async with httpx.AsyncClient(trust_env=False, timeout=self._limit) as http:
            for said in task.person:
                script.newest = said.text
                loop.messages.append(_user_message(said, await upload(loop.chat, said)))
                while (calls := await self._ask(http, loop)) is not None:
                    for call in calls:
                        loop.messages += await self._results(loop, call)

    async def _ask(self, http: httpx.AsyncClient, loop: _Loop) -> list[dict[str, Any]] | None:
        """Ask the model; returns its tool calls, None when it has answered in words."""
        if loop.requests >= _MOST_REQUESTS:
            raise _TooManyRequestsError(f"more than {_MOST_REQUESTS} requests")
        body = {"model": self._endpoint.model, "messages": loop.messages, "tools": self._tools}
        headers = {"authorization": f"Bearer {self._endpoint.api_key}"}
        loop.requests += 1
        url = f"{self._endpoint.base_url}/chat/completions"
        answer = (await http.post(url, json=body, headers=headers)).raise_for_status().json()
        usage = answer.get("usage") or {}
        loop.prompt_tokens += usage.get("prompt_tokens") or 0
        loop.completion_tokens += usage.get("completion_tokens") or 0
        message = answer["choices"][0]["message"]
        loop.messages.append(message)
        if message.get("tool_calls"):
            return list(message["tool_calls"])
        if message.get("content"):
            loop.texts.append(message["content"])
        return None

    async def _results(self, loop: _Loop, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a call; returns its message, and one with the pictures of its result."""
        value = await self._result(loop, call["function"]["name"], call["function"]["arguments"])
        pictures = [part for part in value if _is_picture(part)] if isinstance(value, list) else []
        if pictures:
            value = [part for part in value if not _is_picture(part)]
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown = [{"role": "tool", "tool_call_id": call["id"], "content": text}]
        # The protocol's results are text; pictures are shown by a message of the user.
        return [*shown, {"role": "user", "content": pictures}] if pictures else shown

    async def _result(self, loop: _Loop, name: str, text: str) -> Any:
        method = self._methods.get(name)
        if method is None:
            return f"error: there is no tool {name!r}"
        try:
            given = json.loads(text or "{}")
        except ValueError as exc:
            return f"error: the arguments are no JSON: {exc}"
        if method.requires_approval:
            decision = next(loop.decisions, None)
            if decision is None or not decision.is_approved:
                return f"error: denied: {decision.reason if decision else 'not expected'}"
            given = decision.kwargs or given
        try:
            found = await self._client.call(
                method.task,
                kwargs=given,
                chat_key=loop.chat.key,
                user_id=loop.chat.key,
                timeout_seconds=self._limit,
            )
        except ApiError as error:
            return f"error: {error}"
        loop.calls.append(method.task)
        return found.value


class _TooManyRequestsError(Exception):
    """The model calls tools without end."""


def _user_message(said: Said, files: Sequence[FileInfo]) -> dict[str, Any]:
    lines = [said.text]
    parts: list[dict[str, Any]] = []
    for file in files:
        kind = "image" if file.media_type.startswith("image/") else "file"
        lines.append(f"[{kind}: {file.path} ({file.media_type}, {file.size_bytes} bytes)]")
        if kind == "image":
            data = base64.b64encode(said.files[file.name]).decode()
            url = f"data:{file.media_type};base64,{data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
    text = "\n".join(lines)
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts] if parts else text}


def _is_picture(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"
