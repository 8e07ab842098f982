"""The points that the tour must show; each is checked against records, not against the model's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from nekro.cli.demo import scenes
from nekro.cli.demo.evidence import Evidence, file_of
from nekro.sandbox.models import StopType
from nekro_agent.ports import MessageKind
from storage.repositories.rounds import Round

__all__ = ["NO_PACKAGES", "Point", "check"]

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
