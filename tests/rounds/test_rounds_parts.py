"""Pictures and files of people's messages: in hooks, in prompts and in sandboxes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from PIL import Image
from round_bench import Bench, Model

from nekro.agent.llm import LLMAnswer, LLMRequest
from nekro.agent.model import ImagePart, TextPart
from nekro.agent.multimodal import image_data
from nekro.app import use_cases
from nekro.app.chats.attachments import Attachment, attachments_of
from nekro_agent.errors import InvalidValueError, UploadQuotaError

OpenBench = Callable[..., Awaitable[Bench]]
PLUGINS = {"dirs": (Path(__file__).parent / "parts_plugins",)}
#: A picture of one red pixel.
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
CHAT = "parts-private_1"


@pytest.fixture
def kind() -> str:
    """One kind of database: files are on the disk, and their rows are tested on both."""
    return "sqlite"


class SeeingModel(Model):
    """A model that also records the parts of its prompts."""

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.requests: list[LLMRequest] = []

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        self.requests.append(request)
        return await super().complete(request)

    def images(self, number: int = -1) -> list[tuple[str, str]]:
        """The pictures of a prompt, each with the text before it."""
        found = []
        for message in self.requests[number].messages:
            for before, part in zip(message.parts, message.parts[1:], strict=False):
                if isinstance(part, ImagePart):
                    assert isinstance(before, TextPart)
                    found.append((before.text.rsplit("\n", 1)[-1], part.url))
        return found


async def store(bench: Bench, name: str, content: bytes) -> Attachment:
    files = bench.services.files_of(await bench.services.chat(CHAT))
    return await asyncio.to_thread(files.add, name, content)


async def post(bench: Bench, text: str, *files: Attachment) -> str | None:
    return await use_cases.receive_message(
        bench.services, CHAT, text, user_id="ada", user_name="Ada", files=files
    )


@pytest.mark.extended
async def test_a_picture_and_a_file_reach_hooks_prompt_and_sandbox(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS)
    picture, table = await store(bench, "cat.png", PIXEL), await store(bench, "../a/table.csv", b"a,b\n1,2\n")
    assert (picture.kind, picture.media_type, picture.size_bytes) == ("image", "image/png", len(PIXEL))
    assert (table.kind, table.path, table.media_type) == ("file", "/app/uploads/table.csv", "text/csv")
    await post(bench, "What is this?", picture, table)
    model = SeeingModel(
        'send_msg_text(_ck, open("/app/uploads/table.csv").read())\n'
        'send_msg_file(_ck, "/app/uploads/cat.png")'
    )
    await bench.play(CHAT, bench.drain(model))
    album = next(plugin for plugin in bench.services.host.plugins if plugin.key == "Ada.album")
    seen = json.loads(await album.store.get(chat_key=CHAT, store_key="seen") or "[]")
    assert seen == [["text", "What is this?"], ["image", "cat.png", len(PIXEL)], ["file", "table.csv", 8]]
    ((label, url),) = model.images()
    assert label == "[image: /app/uploads/cat.png]"
    assert url.startswith("data:image/png;base64,")
    assert f"[image: /app/uploads/cat.png (image/png, {len(PIXEL)} bytes)]" in model.prompts[0]
    assert "[file: /app/uploads/table.csv (text/csv, 8 bytes)]" in model.prompts[0]
    question, answer, sent = await bench.messages(CHAT)
    assert attachments_of(question.data) == [picture, table]
    assert answer.text == "a,b\n1,2\n"
    (kept,) = attachments_of(sent.data)
    assert (kept.kind, kept.path, kept.size_bytes) == ("image", "/app/uploads/cat.png", len(PIXEL))
    assert kept.modified_ns == picture.modified_ns


@pytest.mark.extended
async def test_a_prompt_shows_the_newest_pictures_only(kind: str, open_bench: OpenBench) -> None:
    bench = await open_bench(kind, plugins=PLUGINS, agent={"history_images": 2})
    for number in range(3):
        await post(bench, "", await store(bench, f"{number}.png", PIXEL + bytes([number])))
    model = SeeingModel("print(1)")
    await bench.play(CHAT, bench.drain(model))
    assert [label for label, _ in model.images()] == [
        "[image: /app/uploads/1.png]",
        "[image: /app/uploads/2.png]",
    ]
    assert (
        "[image: /app/uploads/0.png (image/png, 70 bytes); not shown: only the newest 2 are]"
        in model.prompts[0]
    )


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ({"llm": {"vision": False}}, "this model sees no images"),
        ({"agent": {"history_images": 0}}, "only the newest 0 are"),
    ],
)
async def test_a_model_without_vision_gets_the_names_of_pictures(
    open_bench: OpenBench, groups: dict[str, dict[str, object]], reason: str
) -> None:
    bench = await open_bench("sqlite", plugins=PLUGINS, **groups)
    await post(bench, "", await store(bench, "cat.png", PIXEL))
    model = SeeingModel("print(1)")
    await bench.play(CHAT, bench.drain(model))
    assert model.images() == []
    named = f"[image: /app/uploads/cat.png (image/png, {len(PIXEL)} bytes); not shown: {reason}]"
    assert named in model.prompts[0]


async def test_a_picture_that_cannot_be_shown_does_not_fail_the_round(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite", plugins=PLUGINS, agent={"image_file_bytes": 1024})
    large, gone = await store(bench, "large.png", PIXEL + bytes(2000)), await store(bench, "gone.png", PIXEL)
    (bench.services.areas.uploads_dir(CHAT) / "gone.png").unlink()
    await post(bench, "look", large, gone)
    model = SeeingModel('send_msg_text(_ck, "ok")')
    await bench.play(CHAT, bench.drain(model))
    assert model.images() == []
    assert "larger than 1024 bytes" in model.prompts[0] and "no longer exists" in model.prompts[0]
    assert [message.text for message in await bench.messages(CHAT)] == ["look", "ok"]


@pytest.mark.extended
async def test_a_picture_that_a_method_returns_is_made_small_too(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite", plugins=PLUGINS, agent={"image_side": 100, "prompt_images": 1})
    await post(bench, "look", await store(bench, "cat.png", PIXEL))
    model = SeeingModel("enlarge()", 'send_msg_text(_ck, "ok")')
    await bench.play(CHAT, bench.drain(model))
    (image,) = [part for message in model.requests[-1].messages for part in message.images]
    decoded = image_data(image.url)
    assert decoded is not None and Image.open(io.BytesIO(decoded[1])).size == (100, 50)
    assert "[shown: at 100 x 50 of 600 x 300 pixels]" in model.prompts[-1]
    assert "[left out: an image; newer ones use up the number of images of a prompt]" in model.prompts[-1]


async def test_a_stored_file_replaces_no_other_file(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite", plugins=PLUGINS, uploads={"chat_bytes": 1 << 20})
    long = "x" * 300 + ".txt"
    given = [("a.txt", b"1"), ("a.txt", b"2"), ("a.txt", b"1"), ("a.txt", b"3"), (long, b"1"), (long, b"2")]
    names = [(await store(bench, name, content)).path.rsplit("/", 1)[1] for name, content in given]
    assert names[:4] == ["a.txt", "a-2.txt", "a.txt", "a-3.txt"]
    assert [len(name) for name in names[4:]] == [255, 255] and names[5].endswith("-2.txt")
    directory = bench.services.areas.uploads_dir(CHAT)
    (directory / "link.txt").symlink_to("/etc/passwd")
    assert (await store(bench, "link.txt", b"mine")).path == "/app/uploads/link-2.txt"
    with pytest.raises(UploadQuotaError):
        await store(bench, "b.bin", bytes([1]) * (1 << 20))
    for name in ("..", "", "/", "\0"):
        with pytest.raises(InvalidValueError):
            await store(bench, name, b"x")
    assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]


async def test_a_file_that_only_claims_to_be_a_picture_is_a_file(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite", plugins=PLUGINS)
    stored = await store(bench, "fake.png", b"<script>alert(1)</script>")
    assert (stored.kind, stored.media_type) == ("file", "application/octet-stream")
