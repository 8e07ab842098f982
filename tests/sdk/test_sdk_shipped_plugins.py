"""The shipped plugins behave as documented, in memory."""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from pathlib import Path

import pytest

from nekro.plugins.loader import PluginStatus, load_plugins
from nekro.plugins.registry import LoadedRegistry
from nekro_agent.methods import Lane
from nekro_agent.ports import MessageKind
from nekro_agent.testing import InMemoryRuntime


def all_shipped() -> list:
    loaded = load_plugins(entry_points=False)
    assert [record.status for record in loaded.records] == [PluginStatus.OK] * 5
    return loaded.plugins


def test_shipped_plugins_are_in_the_catalogue_with_their_signatures() -> None:
    registry = LoadedRegistry(all_shipped())
    assert registry.find("send_msg_text").task == "nekro.basic.send_msg_text"
    assert registry.find("nekro.notes.save_note").signature == (
        "(note_id: str, title: str, content: str, tags: str = '') -> str"
    )
    assert registry.find("download_model").lane is Lane.LONG
    assert registry.warnings == []


async def test_a_sent_text_and_file_reach_the_history(tmp_path: Path) -> None:
    async with InMemoryRuntime(*all_shipped(), data_dir=tmp_path) as world:
        await world.call("send_msg_text", "test-chat", "hello")
        shared = world.context().fs.shared_path
        (shared / "plot.png").write_bytes(b"png")
        await world.call("send_msg_file", "test-chat", "/app/shared/plot.png")
        assert world.messages.texts("test-chat", MessageKind.ASSISTANT) == ["hello", "[plot.png]"]
        sent = world.messages.sent[1]
        assert (sent.file_path, sent.file_kind) == ("/app/uploads/plot.png", "image")
        assert (world.context().fs.upload_path / "plot.png").read_bytes() == b"png"


async def test_the_agent_cannot_send_to_another_chat(tmp_path: Path) -> None:
    async with InMemoryRuntime(*all_shipped(), data_dir=tmp_path) as world:
        with pytest.raises(ValueError, match="not the current chat"):
            await world.call("send_msg_text", "other-chat", "hello")


async def test_a_long_text_is_viewed_in_parts(tmp_path: Path) -> None:
    async with InMemoryRuntime(*all_shipped(), data_dir=tmp_path) as world:
        first = await world.call("view_str_content", "x" * 8001 + "end")
        assert first.text is not None and first.text.endswith("[4 more characters; go on with start=8000]")
        assert world.messages.triggered == ["test-chat"]
        rest = await world.call("view_str_content", "x" * 8001 + "end", start=8000)
        assert rest.text is not None and rest.text.endswith("xend")


async def test_notes_belong_to_their_user_in_every_chat(tmp_path: Path) -> None:
    async with InMemoryRuntime(*all_shipped(), data_dir=tmp_path) as world:
        saved = await world.call("save_note", "n1", "Title", "Text", "a, b", user_id="ada")
        assert saved.text == "Note 'Title' saved as 'n1'."
        read = await world.call("read_note", "n1", user_id="ada", chat_key="another")
        assert read.value == "Title\nText\nTags: a, b"
        assert (await world.call("list_notes", "b", user_id="ada")).value == {"n1": "Title"}
        assert (await world.call("list_notes", user_id="bob")).value == {}
        await world.call("delete_note", "n1", user_id="ada")
        assert (await world.call("list_notes", user_id="ada")).value == {}


async def test_preferences_have_three_scopes(tmp_path: Path) -> None:
    async with InMemoryRuntime(*all_shipped(), data_dir=tmp_path) as world:
        for scope in ("user", "chat", "global"):
            assert (await world.call("set_preference", "theme", scope, scope=scope)).value is True
        assert (await world.call("set_preference", "theme", "new")).value is False
        assert (await world.call("get_preference", "theme")).value == "new"
        assert (await world.call("get_preference", "theme", "chat", user_id=None)).value == "chat"
        with pytest.raises(ValueError, match="no user triggered"):
            await world.call("set_preference", "theme", "x", user_id=None)
        assert (await world.call("forget_preference", "theme")).text == "Preference 'theme' forgotten."
        assert (await world.call("get_preference", "theme", default="none")).value == "none"


def png_rows(data: bytes, *, size: int) -> list[list[bytes]]:
    """Decode an 8-bit RGB PNG as a strict reader would: signature, checksums, size of the pixels."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, position = {}, 8
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        assert struct.unpack_from(">I", data, position + 8 + length)[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        position += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (size, size, 8, 2, 0, 0, 0)
    pixels = zlib.decompress(chunks[b"IDAT"])
    stride = 1 + 3 * size
    assert len(pixels) == stride * size and not any(pixels[::stride])
    lines = [pixels[y * stride + 1 : (y + 1) * stride] for y in range(size)]
    return [[line[x : x + 3] for x in range(0, len(line), 3)] for line in lines]


async def test_a_drawn_picture_is_a_png_that_decoders_accept(tmp_path: Path) -> None:
    async with InMemoryRuntime(*all_shipped(), data_dir=tmp_path) as world:
        outcome = await world.call("draw_picture", "autumn", size=64)
        assert outcome.segments is not None
        url = outcome.segments[1]["image_url"]["url"]
        rows = png_rows(base64.b64decode(url.removeprefix("data:image/png;base64,")), size=64)
        assert len({tuple(row) for row in rows}) > 1
        assert all(row == row[::-1] for row in rows)
        path = (await world.call("save_picture", "autumn")).value
        assert path.startswith("/app/uploads/picture_")


async def test_a_model_is_downloaded_once_and_checked(tmp_path: Path, file_server) -> None:
    content = b"weights" * 1000
    url = file_server.add("/tiny.gguf", content)
    async with InMemoryRuntime(*all_shipped(), data_dir=tmp_path, downloads=file_server.policy) as world:
        first = await world.call("download_model", url, "tiny")
        assert hashlib.sha256(content).hexdigest() in (first.text or "")
        assert "already here" in ((await world.call("download_model", url, "tiny")).text or "")
        assert file_server.requests == ["/tiny.gguf"]
        loaded = (await world.call("load_model", "tiny", to_sandbox=True)).value
        assert loaded["path"] == "/app/shared/tiny.model"
        assert (world.context().fs.shared_path / "tiny.model").read_bytes() == content
        (tmp_path / "plugins/nekro.model_store/models/tiny.model").write_bytes(b"broken")
        with pytest.raises(ValueError, match="damaged"):
            await world.call("load_model", "tiny")
        with pytest.raises(ValueError, match="model name"):
            await world.call("download_model", url, "../evil")
