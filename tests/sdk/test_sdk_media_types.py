"""The media type of files: by content, then by name."""

from __future__ import annotations

import gzip
import io
import sqlite3
import wave
import zipfile
from pathlib import Path

import pytest

from nekro_agent.errors import InvalidValueError
from nekro_agent.files.file_system import FileSystem
from nekro_agent.files.names import HEAD_BYTES, IMAGE_TYPES, content_type, picture_type, suffix_of
from nekro_agent.services.agent.creator import ContentSegment
from nekro_agent.testing import InMemoryRuntime


def sound() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, 8000, 0, "NONE", ""))
        written.writeframes(bytes(100))
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        written.writestr("a.txt", "a")
    return file.getvalue()


def database(path: Path) -> bytes:
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (a)")
    connection.close()
    return path.read_bytes()


PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
HEADS = {
    "image/png": PNG,
    "image/jpeg": b"\xff\xd8\xff\xe0\x00\x10JFIF",
    "image/gif": b"GIF89a" + bytes(10),
    "image/webp": b"RIFF\x24\x00\x00\x00WEBPVP8 ",
    "image/bmp": b"BM\x46\x00\x00\x00\x00\x00\x00\x00\x36",
    "image/avif": b"\x00\x00\x00\x20ftypavif",
    "image/heic": b"\x00\x00\x00\x18ftypheic",
    "application/pdf": b"%PDF-1.7\n",
    "audio/wav": sound(),
    "audio/mpeg": b"ID3\x04\x00\x00\x00\x00\x00\x00",
    "audio/flac": b"fLaC\x00\x00\x00\x22",
    "audio/ogg": b"OggS\x00\x02" + bytes(22) + b"OpusHead",
    "video/ogg": b"OggS\x00\x02" + bytes(22) + b"\x80theora",
    "audio/mp4": b"\x00\x00\x00\x20ftypM4A \x00",
    "video/mp4": b"\x00\x00\x00\x20ftypisom\x00",
    "video/webm": b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\xf7\x81\x01B\x82\x84webm",
    "application/zip": archive(),
    "application/gzip": gzip.compress(b"x"),
}


@pytest.mark.parametrize("media_type", HEADS)
@pytest.mark.parametrize("name", ["chart", "chart.bin", "chart.html", "chart.svg", "chart.txt"])
def test_content_goes_before_a_name(media_type: str, name: str) -> None:
    assert content_type(name, HEADS[media_type][:HEAD_BYTES]) == media_type


@pytest.mark.parametrize(
    ("name", "head", "media_type"),
    [
        ("photo.jpg", PNG, "image/png"),
        ("photo.png", HEADS["image/jpeg"], "image/jpeg"),
        ("a.docx", archive(), "application/vnd.openxmlformats-officedocument.wordprocessingml.document"),
        ("a.epub", archive(), "application/epub+zip"),
        ("a.tar.gz", gzip.compress(b"x"), "application/x-tar"),
        ("a.csv", b"a,b\n", "text/csv"),
        ("a.unknown-kind", b"text", "application/octet-stream"),
        ("empty.png", b"", "application/octet-stream"),
    ],
)
def test_a_name_tells_what_the_content_does_not(name: str, head: bytes, media_type: str) -> None:
    assert content_type(name, head[:HEAD_BYTES]) == media_type


def test_a_database_is_recognised(tmp_path: Path) -> None:
    assert content_type("x", database(tmp_path / "x")[:HEAD_BYTES]) == "application/vnd.sqlite3"


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.gif", "a.webp", "a.svg", "a.html", "a"])
@pytest.mark.parametrize(
    "head",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'>",
        b"<html><script>",
        b"  <!DOCTYPE html>",
        b"\xef\xbb\xbf<svg>",
    ],
)
def test_markup_is_never_a_picture(name: str, head: bytes) -> None:
    assert content_type(name, head) not in IMAGE_TYPES and picture_type(head) is None


def test_a_suffix_is_that_of_the_content_unless_it_is_a_container() -> None:
    assert (suffix_of(PNG), suffix_of(sound()), suffix_of(archive()), suffix_of(b"text")) == (
        ".png", ".wav", None, None,
    )  # fmt: skip


async def test_content_without_a_name_gets_its_suffix(fs: FileSystem) -> None:
    assert (await fs.mixed_forward_file(PNG)).endswith(".png")
    assert (await fs.mixed_forward_file("data:application/octet-stream;base64,JVBERi0xLjcK")).endswith(".pdf")


@pytest.mark.parametrize(("kind", "name"), [("file", "chart"), ("image", "chart.jpg")])
async def test_a_sent_file_is_recorded_with_the_type_of_its_content(
    fs: FileSystem, world: InMemoryRuntime, kind: str, name: str
) -> None:
    (fs.shared_path / name).write_bytes(PNG)
    context = world.context()
    send = context.ms.send_file if kind == "file" else context.ms.send_image
    await send("test-chat", name, context)
    assert world.messages.sent[-1].file_media_type == "image/png"


def test_a_picture_for_the_model_has_the_type_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "chart.jpg").write_bytes(PNG)
    part = ContentSegment.image_content_from_path(tmp_path / "chart.jpg")
    assert part["image_url"]["url"].startswith("data:image/png;")
    (tmp_path / "page.png").write_bytes(b"<html>")
    with pytest.raises(InvalidValueError, match="does not look like an image"):
        ContentSegment.image_content_from_path(tmp_path / "page.png")
