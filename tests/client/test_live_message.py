"""Putting together the words of a message that a model still writes."""

from __future__ import annotations

from nekro_client.sse import LiveMessage


def test_pieces_grow_a_message_and_repetitions_add_nothing() -> None:
    live = LiveMessage()
    assert live.add("r1", {"offset": 0, "text": "Hello"}) == "Hello"
    assert live.add("r1", {"offset": 5, "text": ", Ada"}) == ", Ada"
    assert live.add("r1", {"offset": 0, "text": "Hello, Ada! How"}) == "! How"
    assert live.add("r1", {"offset": 2, "text": "llo"}) == ""
    assert (live.round_id, live.text) == ("r1", "Hello, Ada! How")


def test_what_cannot_be_joined_is_ignored() -> None:
    live = LiveMessage()
    assert live.add("r1", {"offset": 9, "text": "later"}) == ""
    assert live.round_id is None
    live.add("r1", {"offset": 0, "text": "Hello"})
    for round_id, data in [
        ("r2", {"offset": 0, "text": "Other"}),
        ("r1", {"offset": 0, "text": "Hi there"}),
        ("r1", {"offset": -1, "text": "x"}),
        ("r1", {"offset": "0", "text": "x"}),
        ("r1", {"text": "x"}),
        (None, {"offset": 5, "text": "x"}),
    ]:
        assert live.add(round_id, data) == ""
    assert live.text == "Hello"


def test_late_pieces_of_a_settled_round_count_no_more() -> None:
    live = LiveMessage()
    live.add("r1", {"offset": 0, "text": "Hello"})
    assert live.settle("r2") == ""
    assert live.settle("r1") == "Hello"
    assert live.add("r1", {"offset": 0, "text": "Hello again"}) == ""


def test_a_round_that_begins_again_may_write_other_words() -> None:
    live = LiveMessage()
    live.add("r1", {"offset": 0, "text": "Hello"})
    assert live.settle("r1", goes_on=True) == "Hello"
    assert live.add("r1", {"offset": 0, "text": "Good day"}) == "Good day"
