"""Pictures that plugins make small in their worker."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from picture_files import bomb, noise, saved
from PIL import EpsImagePlugin, Image

from nekro_agent.tools.image_utils import process_image_data_url

#: Pillow has the program `gs` draw it.
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize("form", ["BMP", "GIF", "JPEG", "PNG", "WEBP"])
async def test_a_large_picture_is_made_small(form: str) -> None:
    url = await process_image_data_url(url_of(saved(noise(200, 100), form)), max_size=5_000)
    content = base64.b64decode(url.partition(",")[2])
    assert len(content) <= 5_000 and Image.open(io.BytesIO(content)).format == "JPEG"
    assert await process_image_data_url(url, max_size=5_000) == url


async def test_a_page_of_postscript_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, started = tmp_path / "gs", tmp_path / "started"
    program.write_text(f"#!/bin/sh\necho 10.0 >> {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow searches for it once
    url = url_of(POSTSCRIPT)
    assert await process_image_data_url(url, max_size=10) == url
    assert not started.exists()


async def test_a_picture_with_too_many_pixels_is_not_decoded() -> None:
    url = url_of(bomb(7_000))
    assert await process_image_data_url(url, max_size=1_000) == url
