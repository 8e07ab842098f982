"""Pictures of prompts: decoded in confined processes, made small, counted; all pictures are real."""

from __future__ import annotations

import asyncio
import io
import random
import struct
import subprocess
import sys
import zlib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from picture_files import bomb, noise, saved
from PIL import Image

import nekro.agent.pictures
from broker_config.settings import AgentSettings
from nekro.agent.model import ImagePart, PromptMessage, PromptRole, TextPart
from nekro.agent.multimodal import image_data
from nekro.agent.pictures import decoder
from nekro.agent.pictures.decoder import DecodeLimits, PictureDecoder, ShownPicture, UnshownPicture
from nekro.agent.pictures.fit import PromptPictures
from nekro.agent.room import MOST_TOKENS, tokens_of_image
from nekro.sandbox.filter.seccomp import computing_filter

LIMITS = DecodeLimits(side=256, bytes=40_000, pixels=1_000_000)


def halves(mode: str = "RGB") -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", (40, 20), "red")
    image.paste(Image.new("RGB", (20, 20), "blue"), (20, 0))
    return image.convert(mode)


def animation() -> bytes:
    frames = [Image.new("RGB", (40, 20), colour) for colour in ("red", "blue", "green")]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


def turned() -> bytes:
    """A picture that a camera stored on its side, with data about the camera."""
    exif = Image.Exif()
    exif[274], exif[271] = 6, "Secret Camera"
    return saved(halves(), "JPEG", exif=exif, quality=95)


async def shown(data: bytes, limits: DecodeLimits = LIMITS) -> tuple[ShownPicture, Image.Image]:
    picture = await PictureDecoder().decode(data, limits)
    assert isinstance(picture, ShownPicture), picture
    return picture, Image.open(io.BytesIO(picture.content))


async def refused(data: bytes, limits: DecodeLimits = LIMITS) -> str:
    picture = await PictureDecoder().decode(data, limits)
    assert isinstance(picture, UnshownPicture)
    return picture.reason


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
async def test_a_large_picture_is_scaled_to_side_and_bytes(form: str) -> None:
    picture, image = await shown(saved(noise(600, 300), form))
    assert picture.was == (600, 300) and picture.is_scaled
    assert max(image.size) <= 256 and image.size == (picture.width, picture.height)
    assert len(picture.content) <= LIMITS.bytes


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "LA", "RGBA", "I;16"])
async def test_every_kind_of_pixels_is_shown(mode: str) -> None:
    source = Image.new("I;16", (40, 20), 65535) if mode == "I;16" else halves(mode)
    picture, image = await shown(saved(source, "JPEG" if mode == "CMYK" else "PNG"))
    assert (picture.width, picture.height) == (40, 20)
    red, green, blue = image.convert("RGB").getpixel((5, 10))  # type: ignore[misc]
    if mode in ("RGB", "P", "CMYK", "RGBA"):
        assert red > 200 and green < 60 and blue < 60
    if mode == "I;16":
        assert red == 255


async def test_a_picture_is_turned_upright_and_loses_its_metadata() -> None:
    picture, image = await shown(turned())
    assert image.size == picture.was == (20, 40)
    red, _, blue = image.convert("RGB").getpixel((10, 5))  # type: ignore[misc]
    assert red > 200 and blue < 60
    assert b"Secret" not in picture.content and not image.getexif()


async def test_of_an_animation_the_first_frame_is_shown() -> None:
    picture, image = await shown(animation())
    assert picture.is_animated
    assert image.convert("RGB").getpixel((5, 5)) == (255, 0, 0)


@pytest.mark.extended
async def test_a_bomb_is_refused_by_its_dimensions_and_by_its_memory() -> None:
    data = bomb(50_000)
    assert len(data) < 400_000
    assert await refused(data) == "it has 50000 x 50000 pixels, more than 1000000"
    # 100 megapixels of RGBA do not fit into the memory of a limit that its header satisfies by a lie.
    lied = bytearray(bomb(10_000))
    lied[16:24] = struct.pack(">II", 900, 900)
    lied[29:33] = struct.pack(">I", zlib.crc32(bytes(lied[12:29])))
    result = await PictureDecoder().decode(bytes(lied), LIMITS)
    assert isinstance(result, UnshownPicture) or (result.width, result.height) == (256, 256)


CONFINED = """
import os, posix, sys
sys.path.insert(0, sys.argv[1])
import program
program.confine({"memory_bytes": 300 << 20, "cpu_seconds": 5}, bytes.fromhex(sys.argv[2]))
for act in (
    lambda: bytearray(400 << 20), lambda: open("/etc/passwd"), lambda: open("/tmp/x", "w"), os.fork,
    lambda: os.kill(1, 0), lambda: posix.listdir("/"),
):
    try:
        act()
    except BaseException as exc:
        print(type(exc).__name__)
    else:
        print("done")
"""


def test_the_decoder_has_little_memory_and_no_files_and_processes() -> None:
    command = [sys.executable, "-c", CONFINED, nekro.agent.pictures.__path__[0], computing_filter().hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["MemoryError", *["PermissionError"] * 5], done.stderr


@pytest.mark.extended
async def test_broken_pictures_are_refused_and_never_raise() -> None:
    whole = [saved(noise(60, 40), "PNG"), saved(noise(60, 40), "JPEG"), animation()]
    chance = random.Random(11)
    decoder = PictureDecoder()
    for number in range(12):
        data = bytearray(whole[number % 3])
        for _ in range(1 + number):
            data[chance.randrange(8, len(data))] = chance.randrange(256)
        result = await decoder.decode(bytes(data[: len(data) - number * 20]), LIMITS)
        assert isinstance(result, ShownPicture | UnshownPicture)
    assert "damaged" in await refused(b"\x89PNG\r\n\x1a\n")
    assert "damaged" in await refused(b"\x00\x00\x00\x18ftypheic" + bytes(64))
    assert "does not fit" in await refused(whole[1], DecodeLimits(side=60, bytes=100, pixels=10_000))


@pytest.mark.parametrize(
    "line",
    [
        '{"width": 1e999, "height": 1, "was": [1, 1], "animated": false}',
        "[" * 30_000,
        "5",
        "[]",
        "{}",
        "\xff",
    ],
    ids=["infinite", "deep", "number", "list", "empty", "bytes"],
)
async def test_whatever_a_process_writes_that_a_picture_took_over_is_no_error(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.stdout.buffer.write({line.encode('latin-1')!r} + b'\\nx')\n")
    monkeypatch.setattr(decoder, "_PROGRAM", program)
    assert await refused(b"x") == "its decoder failed"


async def test_a_picture_is_decoded_once() -> None:
    decoder = PictureDecoder()
    data = saved(halves())
    first, second = await asyncio.gather(decoder.decode(data, LIMITS), decoder.decode(data, LIMITS))
    assert first is second is await decoder.decode(bytes(data), LIMITS)
    assert decoder.started == 1
    await asyncio.gather(*(decoder.decode(b"x", LIMITS) for _ in range(2)))
    await decoder.decode(b"x", LIMITS)
    assert decoder.started == 2


@pytest.mark.parametrize(
    ("width", "height", "detail", "tokens"),
    [(1, 1, None, 255), (512, 512, "auto", 255), (1024, 1024, "high", 765), (2048, 4096, "high", 1105),
     (50_000, 1, "high", 765), (2048, 2048, "low", 85), (2048, 768, "high", MOST_TOKENS)],
)  # fmt: skip
def test_tokens_count_tiles(width: int, height: int, detail: str | None, tokens: int) -> None:
    assert tokens_of_image(width, height, detail) == tokens


def part(data: bytes, **fields: Any) -> ImagePart:
    return ImagePart(url="data:image/png;base64," + b64encode(data).decode(), **fields)


def message(*parts: TextPart | ImagePart) -> PromptMessage:
    return PromptMessage(role=PromptRole.USER, parts=parts)


async def fit(messages: Sequence[PromptMessage], detail: str | None = None, **agent: Any) -> PromptMessage:
    (fitted,) = await PromptPictures(AgentSettings(**agent)).fit(
        messages, sees=True, detail=detail, most_tokens=100_000
    )
    return fitted


async def test_a_prompt_names_what_it_does_not_show_and_why() -> None:
    before, between, after = (TextPart(text=text) for text in "abc")
    old, new = part(saved(halves())), part(saved(noise(300, 200)))
    prompt = message(before, old, between, new, after)
    fitted = await fit([prompt], prompt_images=1, image_side=150)
    (image,) = fitted.images
    assert fitted.text == (
        "a\n[left out: an image; newer ones use up the number of images of a prompt]\nb\n"
        "[shown: at 150 x 100 of 300 x 200 pixels]\nc"
    )
    assert fitted.parts[1] is image
    for limit, name in (("prompt_image_bytes", "bytes"), ("prompt_image_tokens", "tokens")):
        text = (await fit([message(old)], **{limit: 10})).text
        assert text == (
            f"[left out: an image of 40 x 20 pixels; newer ones use up the {name} of images of a prompt]"
        )


async def test_the_model_groups_detail_applies_unless_a_picture_states_its_own() -> None:
    data = saved(noise(800, 100))
    url = ImagePart(url="https://example.org/cat.png")
    fitted = await fit([message(part(data), part(data, detail="high"), url)], detail="low")
    assert [image.detail for image in fitted.images] == ["low", "high", "low"]
    small, large = (image_data(image.url) for image in fitted.images[:2])
    assert small is not None and large is not None
    assert Image.open(io.BytesIO(small[1])).size == (512, 64)
    assert Image.open(io.BytesIO(large[1])).size == (800, 100)
    assert fitted.images[2].url == url.url


async def test_a_model_without_vision_gets_sentences() -> None:
    pictures = PromptPictures(AgentSettings())
    prompt = (message(TextPart(text="a"), part(b"\x89PNG")), message(TextPart(text="b")))
    fitted = await pictures.fit(prompt, sees=False, detail=None, most_tokens=100_000)
    assert [one.text for one in fitted] == ["a\n[left out: this model sees no images]", "b"]
    assert not any(one.images for one in fitted) and pictures.decoder.started == 0
