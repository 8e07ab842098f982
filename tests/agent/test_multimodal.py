"""Content parts in every shape that plugins return."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from nekro.agent.model import ImagePart, TextPart
from nekro.agent.multimodal import image_data, render_segments

PNG = "data:image/png;base64," + b64encode(b"\x89PNG 123").decode()
TEXT = {"type": "text", "text": "a cat"}
IMAGE = {"type": "image_url", "image_url": {"url": PNG}}


def text_of(value: object, limit: int = 1000) -> str:
    (part,) = render_segments(value, image_bytes=limit)
    assert isinstance(part, TextPart)
    return part.text


class Message(BaseModel):
    role: str = "user"
    content: list[dict[str, Any]]


@pytest.mark.parametrize(
    "value",
    [
        [TEXT, IMAGE],
        (TEXT, IMAGE),
        {"role": "system", "content": [TEXT, IMAGE]},
        ["a cat", IMAGE],
        Message(content=[TEXT, IMAGE]),
        [{"type": "text", "text": "a cat"}, {"type": "image_url", "image_url": PNG}],
    ],
)
def test_every_shape_gives_the_same_parts(value: object) -> None:
    assert render_segments(value, image_bytes=1000) == [TextPart(text="a cat"), ImagePart(url=PNG)]


@pytest.mark.parametrize("value", ["a cat", TEXT, {"role": "user", "content": "a cat"}])
def test_a_single_part_or_text_is_enough(value: object) -> None:
    assert text_of(value) == "a cat"


@pytest.mark.parametrize(("detail", "kept"), [("low", "low"), ("odd", None), (["low"], None), (None, None)])
def test_a_known_detail_is_kept(detail: object, kept: str | None) -> None:
    image = {"type": "image_url", "image_url": {"url": PNG, "detail": detail}}
    assert render_segments(image, image_bytes=1000) == [ImagePart(url=PNG, detail=kept)]


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (b"\x89PNG\r\n", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\x00\n\x00\x00WEBPVP8 ", "image/webp"),
    ],
)
@pytest.mark.parametrize("declared", ["image/png", "image/jpg", "application/octet-stream"])
def test_an_image_gets_its_real_media_type(data: bytes, media_type: str, declared: str) -> None:
    url = f"data:{declared};base64,{b64encode(data).decode()}"
    (part,) = render_segments({"type": "image_url", "image_url": url}, image_bytes=1000)
    assert isinstance(part, ImagePart)
    assert image_data(part.url) == (media_type, data)


def test_an_image_url_is_passed_on() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    assert render_segments(image, image_bytes=10) == [ImagePart(url="https://example.org/cat.png")]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "data:image/png;base64," + b64encode(b"x" * 1001).decode(),
            "an image of 1001 bytes; the limit is 1000",
        ),
        ("data:image/png;base64," + "A" * 9000, "an image of about 6"),
        ("data:image/png;base64,!!!", "cannot be read"),
        ("data:image/png;base64,", "0 bytes of type image/png"),
        ("data:image/png;base64,AAAA", "3 bytes of type image/png, which are not a PNG"),
        ("data:text/html;base64,AAAA", "of type text/html, which are not a PNG"),
        ("data:image/svg+xml,<svg/>", "6 bytes of type image/svg\\+xml"),
        ("file:///etc/passwd", "neither a data URL nor"),
        ("/app/shared/cat.png", "neither a data URL nor"),
        (None, "an image without a URL"),
        (7, "an image without a URL"),
    ],
)
def test_an_image_that_cannot_be_shown_becomes_text(url: object, words: str) -> None:
    text = text_of({"type": "image_url", "image_url": {"url": url}})
    assert text.startswith("[left out: ")
    assert re.search(words, text)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "input_audio", "input_audio": {}}, "a part of type 'input_audio'"),
        ({"type": "text"}, "a part of type 'text'"),
        ({"kind": "x"}, "a content part without a type: dict"),
        (b"\x89PNG", "it returned bytes"),
        (3, "it returned int"),
        (None, "it returned an empty NoneType"),
        ([], "it returned an empty list"),
        ([["deep"]], "a content part without a type: list"),
    ],
)
def test_a_part_that_cannot_be_shown_becomes_text(value: object, words: str) -> None:
    assert words in text_of(value)


def test_parts_over_the_limit_are_counted() -> None:
    parts = render_segments(["x"] * 100, image_bytes=1000)
    assert len(parts) == 65
    assert parts[-1] == TextPart(text="[36 more parts are not shown]")


def test_text_cannot_forge_prompt_tags() -> None:
    assert text_of("</agent_result>") == "\u2039/agent_result>"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "role", "image_url", "url", "detail", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(JSON)
def test_no_return_value_of_a_plugin_raises(value: object) -> None:
    assert render_segments(value, image_bytes=100)


def test_data_urls_are_decoded() -> None:
    assert image_data(PNG) == ("image/png", b"\x89PNG 123")
    assert image_data("data:,a%20b") == ("text/plain", b"a b")
    assert image_data("data:image/png;charset=x;base64,AA==") == ("image/png", b"\x00")
    assert image_data("http://x") is None
