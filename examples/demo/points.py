"""What the tour recorded, and the points that it must show, which are checked against these records."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nekro.sandbox.models import StopType
from nekro.sandbox.packages.base import named_packages
from nekro_agent.ports import MessageKind
from storage.repositories.messages import Message
from storage.repositories.rounds import Round

from . import scenes
from .stage import TaskRecord

if TYPE_CHECKING:
    from .stage import Stage

__all__ = [
    "NO_PACKAGES",
    "Evidence",
    "LLMRequestRecord",
    "Point",
    "check",
    "file_of",
    "gather",
]


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
    async with database.read() as transaction:
        messages = await transaction.messages.newest(chat_key, limit=_LIMIT)
        rounds = await transaction.rounds.newest(chat_key, limit=_LIMIT)
    return Evidence(
        messages=messages,
        rounds=rounds,
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
    from storage.repositories.chats import ChatRepository

    async with stage.services.database.read() as transaction:
        chat = await ChatRepository(transaction.connection).get(chat_key)
    areas = stage.services.areas
    return list((await asyncio.to_thread(areas.shared_dir, chat.container_key)).iterdir())


async def _pictures_shown(stage: Stage, chat_key: str) -> list[str]:
    from nekro.agent.pictures.decoder import ShownPicture
    from nekro.agent.pictures.fit import PromptPictures

    pictures = PromptPictures(stage.settings.agent)
    found = []
    uploads = await asyncio.to_thread(stage.services.areas.uploads_dir, chat_key)
    for path in uploads.glob("*.png"):
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


NO_PACKAGES: Final = (
    "pandas and matplotlib are missing in the sandbox; `nekro sandbox packages build` installs them"
)

_PLAN_WORDS: Final = len(scenes.PLAN.split())

_PNG_SHA_WORDS: Final = "SHA-256 "


@dataclass(frozen=True, kw_only=True)
class Point:
    """One guarantee and whether the tour showed it."""

    name: str
    ok: bool
    #: The evidence, or what is missing.
    detail: str
    #: Whether it was not tried, as this machine lacks what it needs; it is not ``ok`` then.
    is_left_out: bool = False


def check(evidence: Evidence) -> list[Point]:
    """Check every point; a point without its records fails instead of raising."""
    points = []
    for name, test in _POINTS:
        try:
            detail = test(evidence)
            points.append(Point(name=name, ok=True, detail=detail))
        except _LeftOutError as exc:
            points.append(Point(name=name, ok=False, detail=str(exc), is_left_out=True))
        except _NotShownError as exc:
            points.append(Point(name=name, ok=False, detail=str(exc)))
    return points


class _NotShownError(Exception):
    """A point was not shown; the message names what is missing. Caught by ``check``."""


class _LeftOutError(Exception):
    """A point was not tried; the message says why. Caught by ``check``."""


def _need(condition: object, missing: str) -> None:
    if not condition:
        raise _NotShownError(missing)


def _tool_value(evidence: Evidence) -> str:
    said = evidence.said("The plan has ")
    tasks = evidence.tasks_of("measure_text")
    _need(tasks, "measure_text was never a task")
    expected = f"The plan has {_PLAN_WORDS} words, says process {tasks[0].pid}."
    _need(said == expected, f"the chat holds {said!r}, not {expected!r}")
    return f"the code said {said!r}"


def _file_out(evidence: Evidence) -> str:
    _need("plan.txt" in evidence.shared_files, "there is no plan.txt in the shared area")
    tasks = evidence.tasks_of("measure_text")
    _need(tasks, "measure_text was never a task")
    _need(f"{_PLAN_WORDS} words" in evidence.said("The plan has "), "the plugin did not count its words")
    return f"the sandbox wrote plan.txt, process {tasks[0].pid} counted its {_PLAN_WORDS} words"


def _behavior(evidence: Evidence) -> str:
    notes = [message for message in evidence.messages if message.text in scenes.NOTE_TEXTS]
    _need(notes, f"the history holds no {scenes.NOTE_TEXTS[0]!r}")
    kinds = [note.kind for note in notes]
    _need(kinds == [MessageKind.SYSTEM], f"it is there {len(kinds)} times, as {', '.join(kinds)}")
    return f"the history holds, once, {notes[0].text!r}"


def _pair(evidence: Evidence, stop: StopType) -> tuple[Round, Round]:
    """Return the round that ended with this stop type, and the round that followed it."""
    ended = [entry for entry in evidence.rounds if entry.stop_type == stop]
    _need(len(ended) == 1, f"{len(ended)} rounds ended with {stop.name}")
    number = ended[0].number + 1
    next_ones = [r for r in evidence.rounds if r.turn_id == ended[0].turn_id and r.number == number]
    _need(len(next_ones) == 1, f"{len(next_ones)} rounds followed round {ended[0].number}")
    return ended[0], next_ones[0]


def _agent_stops_code(evidence: Evidence) -> str:
    before, _ = _pair(evidence, StopType.AGENT)
    _need(not evidence.said(scenes.NEVER_SAID), "the message after the call was sent")
    _need(scenes.NEVER_FILE not in evidence.shared_files, "the line after the call wrote its file")
    return f"round {before.number} ended with AGENT; neither file nor message of the next lines exists"


def _agent_wakes(evidence: Evidence) -> str:
    before, after = _pair(evidence, StopType.AGENT)
    _need(after.stop_type == StopType.NORMAL, f"the follow-up round ended with {after.stop_type}")
    first, second = evidence.pid_of(before.worker), evidence.pid_of(after.worker)
    _need(first and second, f"workers {before.worker} and {after.worker} are not the tour's")
    _need(first != second, f"both rounds ran in process {first}")
    return f"round {before.number} in process {first}, round {after.number} in process {second}"


def _agent_prompt(evidence: Evidence) -> str:
    _, after = _pair(evidence, StopType.AGENT)
    request = evidence.request_of(after.id)
    _need(request is not None, "no request of the follow-up round was recorded")
    assert request is not None  # noqa: S101 - _need has raised
    result = f"of {len(scenes.PLAN)}:\n{scenes.PLAN}"
    _need(result in request.text, "the result's text is not in the prompt")
    return f"the prompt of round {after.number} holds view_str_content's text"


def _words(evidence: Evidence) -> str:
    _, after = _pair(evidence, StopType.AGENT)
    _need(after.code is None, f"round {after.number} ran a program")
    sent = [message for message in evidence.messages if message.round_id == after.id]
    _need([message.text for message in sent] == [scenes.PLAN_READ], "the answer is not in the chat, once")
    return f"round {after.number} ran nothing; the chat holds {scenes.PLAN_READ!r}"


def _multimodal(evidence: Evidence) -> str:
    _, after = _pair(evidence, StopType.MULTIMODAL_AGENT)
    request = evidence.request_of(after.id)
    images = request.images if request is not None else []
    _need(len(images) == 1, f"the follow-up request carries {len(images)} images")
    digest = str(images[0].get("sha256"))
    # The same topic gives the same picture, and the code sent that one to the chat.
    _need(digest in evidence.pictures_shown, f"the image's digest {digest} is not the drawn picture's")
    return (
        f"one {images[0]['media_type']} of {images[0]['bytes']} bytes in the request, SHA-256 {digest[:12]}…"
    )


def _file_in(evidence: Evidence) -> str:
    said = evidence.said("The picture I saw is ")
    _need(_PNG_SHA_WORDS in said, "the code read no picture")
    path = said.removeprefix("The picture I saw is ").partition(",")[0]
    sent = [file_of(message) for message in evidence.messages]
    _need(path in sent, f"{path} was not sent to the chat")
    return f"the plugin wrote {path}, the code read and sent it"


def _stored_value(evidence: Evidence) -> str:
    said = evidence.said(scenes.GREETING)
    _need(said, f"no message begins with {scenes.GREETING}")
    setters, getters = evidence.tasks_of("set_preference"), evidence.tasks_of("get_preference")
    _need(setters and getters, "the preference was not both set and read")
    _need(setters[0].pid != getters[0].pid, "one process did both")
    return (
        f"process {setters[0].pid} stored {scenes.GREETING}; after its end process {getters[0].pid} read it"
    )


def _download(evidence: Evidence) -> str:
    tasks = evidence.tasks_of("download_model")
    _need(len(tasks) == 1, f"download_model was a task {len(tasks)} times")
    _need(tasks[0].pid == evidence.pids["long-1"], f"it ran on {tasks[0].worker}")
    _need(evidence.model_requests, "the model server was not asked")
    _need(
        evidence.model_sha256 in evidence.said(scenes.GREETING),
        "the sandbox saw other bytes than were served",
    )
    notices = [message for message in evidence.messages if message.text.startswith("Model 'tiny' downloaded")]
    _need(len(notices) == 1, f"the chat got {len(notices)} messages that the download is done")
    where = f"long-1 (process {tasks[0].pid})"
    digest = f"{evidence.model_sha256[:12]}…"
    return f"fetched on {where} as a job, the chat was notified, and the sandbox found SHA-256 {digest}"


def _chart(evidence: Evidence) -> str:
    if not evidence.packages:
        raise _LeftOutError(NO_PACKAGES)
    _need(evidence.said(scenes.BEST_STALL), f"the chat does not hold {scenes.BEST_STALL!r}")
    _need(evidence.figures, "the shared area holds no figure")
    name, (width, height) = next(iter(evidence.figures.items()))
    _need(width and height, f"{name} is no PNG")
    # A file that is sent is kept in the uploads.
    sent = [file_of(message) for message in evidence.messages]
    _need(f"/app/uploads/{name}" in sent, f"{name} was not sent to the chat")
    return f"the code read the CSV and drew {name}, {width} x {height}, which the chat got"


_POINTS: Final[Sequence[tuple[str, Callable[[Evidence], str]]]] = (
    ("a TOOL value is used by the code", _tool_value),
    ("a file of the sandbox is read by a plugin", _file_out),
    ("a BEHAVIOR text is in the chat's history", _behavior),
    ("after an AGENT call the next line does not run", _agent_stops_code),
    ("a follow-up round runs in another process", _agent_wakes),
    ("the AGENT text is in that round's prompt", _agent_prompt),
    ("an answer in words is sent to the chat", _words),
    ("a MULTIMODAL_AGENT image is in the next request", _multimodal),
    ("a file of a plugin is read in the sandbox", _file_in),
    ("a model download runs in lane long", _download),
    ("a stored value outlives the process that stored it", _stored_value),
    ("a chart of an uploaded CSV is sent to the chat", _chart),
)
