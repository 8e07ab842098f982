"""A turn as lines of text, the same tree that the console shows, and output of programs while they print."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Final, NamedTuple

from nekro.agent.answers.extraction import text_beside_code
from nekro.cli.output import one_line
from nekro_agent.tools.visible_text import visible_lines
from nekro_client.models import Call, Message, PromptMessage, Round, Turn, Wait

__all__ = [
    "Line",
    "RunningOutput",
    "is_over",
    "turn_lines",
    "wait_text",
]


_COLUMNS: Final = 110
#: Most lines of a program or its output; ``--json`` has all.
_MOST_LINES: Final = 60


class Line(NamedTuple):
    """A line of the tree; a follower prints each key once."""

    key: str
    text: str


def is_over(turn: Turn) -> bool:
    """Whether nothing more will happen in a turn."""
    return turn.finished_at is not None


def turn_lines(turn: Turn, *, without_output: Collection[str] = ()) -> Iterator[Line]:
    """Yield the lines of a turn in the order in which things happened.

    Args:
        without_output: ids of rounds whose output is left out.
    """
    cause = f"{turn.cause.kind} {turn.cause.id}"
    yield Line("turn", f"turn {turn.id}  chat {one_line(turn.chat_key)}  caused by {one_line(cause)}")
    if turn.cause.turn_id is not None:
        yield Line("cause", f"  which came from turn {turn.cause.turn_id}")
    if turn.merged_into is not None and turn.merged_into != turn.id:
        yield Line("merged", f"  answered by turn {turn.merged_into}")
    of_round: dict[str | None, list[Message]] = {}
    for message in turn.messages:
        of_round.setdefault(message.round_id, []).append(message)
    for message in of_round.pop(None, []):
        yield from _message(message)
    for entry in turn.rounds:
        yield from _round(entry, has_output=entry.id not in without_output)
        for message in of_round.pop(entry.id, []):
            yield from _message(message)
    for message in (one for many in of_round.values() for one in many):
        yield from _message(message)
    for job in turn.jobs:
        text = one_line(
            f"job {job.id}  {job.type}  {job.state}  {job.percent} %  {job.message}", limit=_COLUMNS
        )
        yield Line(f"job {job.id} {job.state}", f"  {text.rstrip()}")
    for turn_id in turn.following:
        yield Line(f"following {turn_id}", f"  led to turn {turn_id}")
    if is_over(turn):
        yield Line("end", _end(turn))


def wait_text(wait: Wait) -> str:
    """Return what a program waits for as a phrase."""
    until = "" if wait.until is None else f"until {wait.until:%Y-%m-%d %H:%M:%S} UTC"
    if wait.kind == "time":
        return until
    if wait.kind == "job":
        return f"for job {wait.job_id} {until}".rstrip()
    who = f"of {one_line(wait.user_id, limit=_COLUMNS)}" if wait.user_id else "of a person"
    asked = one_line(wait.question or "", limit=_COLUMNS)
    return f"for the answer {who} to {asked!r} {until}".rstrip()


def _end(turn: Turn) -> str:
    tokens = sum((one.prompt_tokens or 0) + (one.completion_tokens or 0) for one in turn.rounds)
    costs = [one.cost for one in turn.rounds if one.cost is not None]
    parts = [
        f"{turn.state.value} after {_lasted(turn.requested_at, turn.finished_at)}",
        f"for approval {', '.join(turn.waits_for)}" if turn.waits_for else "",
        *(wait_text(wait) for wait in turn.waits),
        f"{len(turn.rounds)} rounds, {sum(len(one.calls) for one in turn.rounds)} calls, {tokens} tokens"
        f"{' (estimated)' if any(one.tokens_estimated for one in turn.rounds) else ''}",
        f"cost {sum(costs):.6g}" if costs else "",
        one_line(f"{turn.error.code}: {turn.error.text}", limit=_COLUMNS) if turn.error else "",
    ]
    return "  ".join(part for part in parts if part)


def _round(entry: Round, *, has_output: bool) -> Iterator[Line]:
    prefix = f"round {entry.id}"
    yield Line(
        prefix, f"  round {entry.number}  caused by {one_line(f'{entry.cause.kind} {entry.cause.id}')}"
    )
    if entry.merged_into is not None:
        yield Line(f"{prefix} merged", f"    merged into round {entry.merged_into}")
        return
    for one in entry.attempts:
        lost = ": its worker died or lost the chat" if one.outcome == "lost" else ""
        last = f", last event at {one.last_event_at:%H:%M:%S}" if lost and one.last_event_at else ""
        again = ", which ran the program again" if one.is_resumed else ""
        text = f"attempt {one.number}  {one.started_at:%H:%M:%S} on {one.worker}{again}"
        yield Line(f"{prefix} attempt {one.number}", f"    {one_line(text)}")
        if lost:
            yield Line(f"{prefix} lost {one.number}", f"    attempt {one.number}  lost{lost}{last}")
    for at, message in enumerate(entry.prompt or ()):
        yield from _block(f"{prefix} prompt {at}", f"sent to the model: {message.role}", _text(message))
    if entry.answered_at is not None:
        yield Line(f"{prefix} model", f"    {one_line(_model(entry), limit=_COLUMNS)}")
    if entry.code is not None and entry.answer:
        yield from _block(f"{prefix} text", "beside the code", text_beside_code(entry.answer))
    yield from _block(f"{prefix} code", "code", entry.code, has_numbers=True)
    for call in entry.calls:
        yield from _call(call)
    if has_output:
        yield from _block(f"{prefix} output", "output", entry.output)
    if entry.finished_at is not None:
        words = [entry.state, entry.stop_type or "", _lasted(entry.started_at, entry.finished_at)]
        error = f"  {entry.error.text}" if entry.error else ""
        text = f"{'  '.join(word for word in words if word)}{error}"
        yield Line(f"{prefix} end", f"    ended  {one_line(text, limit=_COLUMNS)}")


def _text(message: PromptMessage) -> str:
    """Return the parts of a message of a prompt; of an image what is known of it."""
    return "\n".join(
        str(part["content"]) if part["type"] == "text" else json.dumps(part, ensure_ascii=False)
        for part in message.parts
    )


def _model(entry: Round) -> str:
    parts = [
        f"model {entry.model}",
        _lasted(entry.prompted_at or entry.started_at, entry.answered_at),
        f"{entry.prompt_tokens if entry.prompt_tokens is not None else '?'} + "
        f"{entry.completion_tokens if entry.completion_tokens is not None else '?'} tokens"
        f"{' (estimated)' if entry.tokens_estimated else ''}",
        f"cost {entry.cost:.6g}" if entry.cost is not None else "",
        f"{entry.model_tries} tries" if (entry.model_tries or 1) > 1 else "",
        "" if entry.code is not None else "answered in words",
    ]
    return "  ".join(part for part in parts if part)


def _call(call: Call) -> Iterator[Line]:
    parts = [
        f"call {call.method}",
        f"line {call.line}" if call.line is not None else "",
        call.state,
        f"waited {_lasted(call.requested_at, call.started_at)}" if call.started_at else "",
        f"ran {_lasted(call.started_at, call.finished_at)}" if call.started_at and call.finished_at else "",
        f"took {call.duration_ms / 1000:.3f} s"
        if call.duration_ms is not None and not call.started_at
        else "",
        f"on {call.worker}" if call.worker else "",
        f"approval {call.approval_id}" if call.approval_id else "",
        f"led to round {call.follow_up[:8]}" if call.follow_up else "",
    ]
    key = f"call {call.id} {call.state}"
    yield Line(key, f"    {one_line('  '.join(part for part in parts if part))}")
    if call.arguments is not None:
        text = json.dumps(call.arguments, ensure_ascii=False)
        yield Line(f"call {call.id} arguments", f"      arguments  {one_line(text, limit=_COLUMNS)}")
    if call.value is not None:
        text = json.dumps(call.value, ensure_ascii=False)
        yield Line(f"{key} value", f"      value  {one_line(text, limit=_COLUMNS)}")
    if call.error is not None:
        text = f"{call.error.code}: {call.error.text}"
        yield Line(f"{key} error", f"      error  {one_line(text, limit=_COLUMNS)}")


def _message(message: Message) -> Iterator[Line]:
    speaker = one_line(message.sender_name or message.sender_id or message.kind)
    lines = visible_lines(message.text.rstrip("\n")) or [""]
    files = [one_line(f"[{part.type} {part.file.name}]") for part in message.parts if part.type != "text"]
    first, *rest = [*lines, *files]
    key = f"message {message.id}"
    yield Line(key, f"  {message.created_at:%H:%M:%S}  {speaker}: {first}")
    for number, line in enumerate(rest):
        yield Line(f"{key} {number}", f"      {line}")


def _block(key: str, title: str, text: str | None, *, has_numbers: bool = False) -> Iterator[Line]:
    if not text or not text.strip("\n"):
        return
    lines = visible_lines(text.rstrip("\n"))
    yield Line(key, f"    {title}")
    for number, line in enumerate(lines[:_MOST_LINES], start=1):
        yield Line(f"{key} {number}", f"    {number:>4} | {line}" if has_numbers else f"         | {line}")
    if len(lines) > _MOST_LINES:
        yield Line(f"{key} rest", f"         | … {len(lines) - _MOST_LINES} more lines (`--json` has them)")


def _lasted(begin: datetime | None, end: datetime | None) -> str:
    return f"{(end - begin).total_seconds():.3f} s" if begin and end else ""


class RunningOutput:
    """The output of one round, put together from pieces; some may be missing or come late."""

    def __init__(self) -> None:
        #: What came, without a gap since the beginning unless ``_has_gap``.
        self._text = ""
        self._has_gap = False
        #: Number of characters of the output up to the end of the last piece.
        self._end = 0
        #: The last line, which has no end yet.
        self._rest = ""
        self._has_begun = self._is_ended = False

    def add(self, offset: int, text: str) -> Iterator[str]:
        """Yield the lines that a piece completes, as they are printed; none after ``finish``.

        Args:
            offset: number of characters of the output before the piece.
        """
        if self._is_ended:
            return
        if not self._has_begun:
            self._has_begun = True
            yield "    output"
        if offset < self._end:  # another attempt at the round runs the code from its beginning
            yield from self._end_line()
            self._text, self._end, self._has_gap = "", 0, False
        if offset > self._end:
            self._has_gap = True
            yield from self._end_line()
            yield f"         | … {offset - self._end} characters are missing here; the round's end has them"
        self._text += text
        self._end = offset + len(text)
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            yield from _lines(line)

    def finish(self, output: str) -> Iterator[str]:
        """Yield what is missing at the end of the output of a round that has ended.

        A round's end may be read before its last pieces come; these are ignored from now on.
        """
        if self._is_ended:
            return
        if self._has_begun and not self._has_gap and output.startswith(self._text):
            yield from self.add(self._end, output[self._end :])
        self._is_ended = True
        yield from self._end_line()

    def is_all_of(self, output: str) -> bool:
        """Whether what was printed is the output of a round that has ended."""
        return self._has_begun and not self._has_gap and self._text == output

    def _end_line(self) -> Iterator[str]:
        """Yield the last line, if it has no end."""
        rest, self._rest = self._rest, ""
        if rest:
            yield from _lines(rest)


def _lines(line: str) -> Iterator[str]:
    for one in visible_lines(line) or [""]:
        yield f"         | {one}"
