"""Nekro Agent's own client, as its release 2.4.0 on PyPI contains it, on our gateway; unchanged."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from sse_client import ACCESS_KEY
from test_sse_adapter import gateway, invoke, rows
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

pytestmark = pytest.mark.slow
_SDK = "nekro_agent/adapters/sse/sdk/"


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The client's package, taken out of the distribution; the rest of it is not installed."""
    folder = tmp_path_factory.mktemp("sdk")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder)]
    subprocess.run([*command, "nekro-agent==2.4.0"], check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    package = folder / "published_sse_sdk"
    package.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_SDK) and name.endswith(".py"):
                (package / Path(name).name).write_bytes(archive.read(name))
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings(action="ignore"):  # it uses an older style of pydantic
            return importlib.import_module("published_sse_sdk")
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    fleet = make_fleet(gateway={"sse_access_key": ACCESS_KEY})
    fleet.start("methods")
    return fleet


@pytest.mark.filterwarnings("ignore")
async def test_the_published_client_converses_and_receives_files(fleet: Fleet, sdk: Any) -> None:
    channel = f"group_{uuid4().hex[:8]}"
    texts: list[str] = []
    files: dict[str, bytes] = {}

    class Bridge(sdk.SSEClient):  # type: ignore[misc, name-defined]
        async def _handle_send_message(self, event_type: str, data: Any) -> Any:
            for segment in data.segments:
                if segment.type == "text":
                    texts.append(segment.content)
            return sdk.models.SendMessageResponse(message_id=uuid4().hex, success=True)

        async def _on_file_received(self, filename: str, content: bytes, *rest: Any) -> None:
            files[filename] = content

    async with gateway(fleet) as http:
        client = Bridge(
            server_url=str(http.base_url).rstrip("/"),
            platform="wx",
            client_name="bridge",
            client_version="1.0",
            access_key=ACCESS_KEY,
            reconnect_interval=1,
        )
        await client.start()
        try:
            assert await client.subscribe_channel([channel])
            message = sdk.ReceiveMessage(
                msg_id="1",
                from_id="u1",
                from_name="Uma",
                channel_id=channel,
                channel_name="Group",
                platform_name="wx",
                is_to_me=True,
                segments=[sdk.text("hello"), sdk.image(bytes_data=b"\x89PNG....", name="p.png")],
            )
            assert await client.send_message(channel, message)
            ((text,),) = await rows(fleet, "SELECT text FROM messages WHERE chat_key = ?", f"sse-{channel}")
            assert text == "hello"
            await invoke(fleet, channel, "say", *((f"text {number}",) for number in range(20)))
            await eventually(lambda: len(texts) == 20, what="the texts arrive")
            assert texts == [f"text {number}" for number in range(20)]
            await invoke(fleet, channel, "show", ("big.bin", 2_500_000))
            await eventually(lambda: "big.bin" in files, what="the file arrives")
            assert files["big.bin"] == bytes(index % 251 for index in range(2_500_000))

            async def all_confirmed() -> bool:
                states = await rows(
                    fleet, "SELECT DISTINCT state FROM adapter_sends WHERE channel_id = ?", channel
                )
                return [row[0] for row in states] == ["done"]

            await eventually(all_confirmed, what="the client confirmed everything")
        finally:
            await asyncio.wait_for(client.stop(), WAIT_SECONDS)
