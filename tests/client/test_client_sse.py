"""The parser of server-sent events, against the examples of the HTML standard."""

from __future__ import annotations

import pytest

from nekro_client import sse
from nekro_client.sse import EventParser, EventTooLargeError
from nekro_client.streams import EventCursor

#: Streams of the standard's section on interpreting event streams, with the events (type, data, last id).
EXAMPLES = {
    "lines_of_one_event": (
        "data: YHOO\ndata: +2\ndata: 10\n\n",
        [("message", "YHOO\n+2\n10", "")],
    ),
    "comment_ids_and_a_reset_id": (
        ": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n",
        [
            ("message", "first event", "1"),
            ("message", "second event", ""),
            ("message", " third event", ""),
        ],
    ),
    "empty_data_and_an_unfinished_block": (
        "data\n\ndata\ndata\n\ndata:",
        [("message", "", ""), ("message", "\n", "")],
    ),
    "one_space_is_ignored": (
        "data:test\n\ndata: test\n\n",
        [("message", "test", ""), ("message", "test", "")],
    ),
    "types": (
        "event: add\ndata: 73857293\n\nevent: remove\ndata: 2153\n\nevent: add\ndata: 113411\n\n",
        [("add", "73857293", ""), ("remove", "2153", ""), ("add", "113411", "")],
    ),
    "every_line_end": (
        "data: a\r\n\r\ndata: b\r\rdata: c\n\n",
        [("message", "a", ""), ("message", "b", ""), ("message", "c", "")],
    ),
    "only_these_line_ends": (
        "data: a\u2028b\x85c\x0bd\n\n",
        [("message", "a\u2028b\x85c\x0bd", "")],
    ),
    "a_leading_byte_order_mark": ("\ufeffdata: a\n\n", [("message", "a", "")]),
    "an_id_with_nul_is_ignored": (
        "id: 1\ndata: a\n\nid: 2\0\ndata: b\n\n",
        [("message", "a", "1"), ("message", "b", "1")],
    ),
    "unknown_fields": ("colour: red\nDATA: x\ndata: a\n\n", [("message", "a", "")]),
    "a_type_without_data": ("event: add\n\ndata: a\n\n", [("message", "a", "")]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_the_standard_are_read_however_they_are_cut(name: str) -> None:
    text, expected = EXAMPLES[name]
    data = text.encode()
    for size in (len(data), 1, 2, 3, 7):
        parser = EventParser()
        events = [e for at in range(0, len(data), size) for e in parser.feed(data[at : at + size])]
        assert [(e.type, e.data, e.last_id) for e in events] == expected, size


def test_an_id_without_data_moves_the_position() -> None:
    parser = EventParser()
    assert list(parser.feed(b"id: 41\n\n")) == []
    assert parser.last_id == "41"


def test_the_id_of_an_unfinished_event_does_not_count() -> None:
    parser = EventParser()
    assert [e.last_id for e in parser.feed(b"id: 1\ndata: a\n\nid: 2\ndata: b\n")] == ["1"]
    assert parser.last_id == "1"


@pytest.mark.parametrize("text", ["data: " + "x" * 2000, "data: xxxxxxxx\n" * 300])
def test_an_event_without_end_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_CHARACTERS", 1000)
    with pytest.raises(EventTooLargeError, match="more than 1000 characters"):
        list(EventParser().feed(text.encode()))


def test_an_id_that_is_no_number_of_an_event_is_no_position() -> None:
    cursor = EventCursor("chat", after=None, give_up_seconds=None)
    cursor.connect()
    for number in ("9" * 5_000, "9" * 20, "²", "x"):
        assert list(cursor.take(f"id: {number}\n\n".encode())) == []
        assert cursor.last_number is None
    assert list(cursor.take(b"id: 7.0a1b2c3d\n\n")) == []
    assert cursor.last_number == 7
