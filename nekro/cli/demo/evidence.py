"""Collect what the tour recorded: rows, requests to the model, task events and files."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nekro.cli.demo.task_log import TaskRecord
from nekro.cli.views.turns import newest_messages, newest_rounds
from nekro.sandbox.packages.base import named_packages
from storage.repositories.messages import Message
from storage.repositories.rounds import Round

if TYPE_CHECKING:
    from nekro.cli.demo.stage import Stage

__all__ = ["Evidence", "LLMRequestRecord", "file_of", "gather"]

_LIMIT: Final = 200


@dataclass(frozen=True, kw_only=True)
class LLMRequestRecord:
    """One recorded request to the model."""

    at: str
    round_id: str
    messages: Sequence[dict[str, Any]]

    @property
    def text(self) -> str:
        """All text of the request."""
        return "\n".join(part["text"] for part in self._parts() if part["type"] == "text")

    @property
    def images(self) -> list[dict[str, Any]]:
        """Type, length and SHA-256 of each image."""
        return [part["image_url"] for part in self._parts() if part["type"] == "image_url"]

    def _parts(self) -> list[dict[str, Any]]:
        return [part for message in self.messages for part in message["content"]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The records that the points are checked against."""

    messages: Sequence[Message]
    rounds: Sequence[Round]
    requests: Sequence[LLMRequestRecord]
    tasks: Sequence[TaskRecord]
    #: Process id by worker name.
    pids: dict[str, int]
    #: Names of the files in the chat's ``/app/shared``.
    shared_files: frozenset[str]
    #: SHA-256 of each picture in the chat's uploads, as prompts show it: smaller, without metadata.
    pictures_shown: frozenset[str]
    model_sha256: str
    model_requests: int
    #: Width and height by name of each picture in ``/app/shared`` that the end of a run saved.
    figures: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Packages that code can import besides the standard library; "" for none.
    packages: str = ""

    def tasks_of(self, function: str) -> list[TaskRecord]:
        """Tasks of one method, by its function name, oldest first."""
        return [task for task in self.tasks if task.name.split(".")[-1] == function]

    def request_of(self, round_id: str) -> LLMRequestRecord | None:
        """The request that a round sent to the model."""
        return next((request for request in self.requests if request.round_id == round_id), None)

    def said(self, begin: str) -> str:
        """Return the first message that starts with ``begin``, or ""."""
        return next((m.text for m in self.messages if m.text.startswith(begin)), "")

    def pid_of(self, node: str | None) -> int | None:
        """Process id in a node name ``<role>@<host>:<pid>``; None when it is not a worker of the tour."""
        pid = int((node or "").rpartition(":")[2] or 0)
        return pid if pid in self.pids.values() else None

    def name_of(self, pid: int | None) -> str:
        """Name of the worker with that process id."""
        return next((name for name, known in self.pids.items() if known == pid), "?")


def file_of(message: Message) -> str:
    """Sandbox path of the file that a message carries, or ""."""
    return str((message.data or {}).get("file_path", ""))


async def gather(stage: Stage, chat_key: str) -> Evidence:
    """Collect the records of one chat."""
    database = stage.services.database
    record = stage.settings.llm.record
    shared = await _shared_dir(stage, chat_key)
    return Evidence(
        messages=await newest_messages(database, chat_key, limit=_LIMIT),
        rounds=await newest_rounds(database, chat_key, limit=_LIMIT),
        requests=_requests(record, chat_key) if record is not None else [],
        tasks=sorted(stage.tasks.records.values(), key=lambda task: task.received_at),
        pids=dict(stage.pids),
        shared_files=frozenset(path.name for path in shared),
        pictures_shown=frozenset(await _pictures_shown(stage, chat_key)),
        model_sha256=stage.models.sha256,
        model_requests=stage.models.requests,
        figures={path.name: _png_size(path) for path in shared if path.name.startswith("figure-")},
        packages=named_packages(stage.settings.sandbox),
    )


async def _shared_dir(stage: Stage, chat_key: str) -> list[Path]:
    from storage.files.areas import DataAreas
    from storage.repositories.chats import ChatRepository

    async with stage.services.database.read() as transaction:
        chat = await ChatRepository(transaction.connection).get(chat_key)
    return list(DataAreas(stage.settings.data_dir).shared_dir(chat.container_key).iterdir())


async def _pictures_shown(stage: Stage, chat_key: str) -> list[str]:
    from nekro.agent.pictures.decoder import ShownPicture
    from nekro.agent.pictures.fit import PromptPictures

    pictures = PromptPictures(stage.settings.agent)
    found = []
    for path in stage.services.areas.uploads_dir(chat_key).glob("*.png"):
        shown = await pictures.decoder.decode(path.read_bytes(), pictures.limits(None))
        if isinstance(shown, ShownPicture):
            found.append(hashlib.sha256(shown.content).hexdigest())
    return found


def _png_size(path: Path) -> tuple[int, int]:
    """Return width and height in pixels; zeros for a file that is no PNG."""
    head = path.read_bytes()[:24]
    if not head.startswith(b"\x89PNG\r\n\x1a\n") or len(head) < 24:
        return 0, 0
    width, height = struct.unpack(">II", head[16:])
    return width, height


def _requests(record: Path, chat_key: str) -> list[LLMRequestRecord]:
    if not record.exists():
        return []
    lines = [json.loads(line) for line in record.read_text("utf-8").split("\n") if line]
    return [
        LLMRequestRecord(at=line["at"], round_id=line["round_id"], messages=line["messages"])
        for line in lines
        if line["chat_key"] == chat_key
    ]
