"""Files of messages in prompts: code opens exactly the path that is named."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nekro.agent.history import described, file_path
from nekro.agent.model import HistoryFile

_FACTS = {"media_type": "audio/ogg", "size_bytes": 3}


@given(st.text(min_size=1, max_size=40))
def test_a_path_is_written_so_that_code_opens_it(path: str) -> None:
    text = file_path(path)
    assert (ast.literal_eval(text) if text[0] == "'" and text[-1] == "'" else text) == path
    assert text.isprintable() and not set(text) & set('<>[]"')


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (HistoryFile(path="/app/uploads/a.ogg"), "/app/uploads/a.ogg"),
        (
            HistoryFile(path="/app/uploads/a.ogg", name="a.ogg", **_FACTS),
            "/app/uploads/a.ogg (audio/ogg, 3 bytes)",
        ),
        (
            HistoryFile(path="/app/uploads/a-2.ogg", name='a".ogg', **_FACTS),
            "/app/uploads/a-2.ogg (sent as a'.ogg, audio/ogg, 3 bytes)",
        ),
        (HistoryFile(path="/app/uploads/日本.txt"), "/app/uploads/日本.txt"),
    ],
)
def test_a_file_is_named_with_what_is_known(file: HistoryFile, text: str) -> None:
    assert described(file) == text
