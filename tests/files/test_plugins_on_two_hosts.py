"""Files of plugins, their packages and files of chats, by workers that move between two hosts."""

from __future__ import annotations

import asyncio
import uuid
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from s3_process import BUCKET, S3Server
from two_hosts import TwoHosts, run, two_hosts

from nekro.app.services import Services

pytestmark = pytest.mark.extended

PLUGINS = Path(__file__).parent / "fleet_plugins"
CODE = """
print(note({word!r}), book({amount}), versions())
with open("/app/shared/log", "a") as log:
    log.write({word!r})
print(open("/app/shared/log").read())
"""


def make_wheel(directory: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture(params=["moto", "rclone"])
def hosts(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    redis_url: str,
    s3_server: Callable[[str], S3Server],
) -> Iterator[TwoHosts]:
    url, variables = f"s3://{BUCKET}/{uuid.uuid4().hex}", s3_server(request.param).variables
    variables = {**variables, "PIP_NO_INDEX": "1"}
    script = tmp_path / "script.yaml"
    script.write_text("- when: ''\n  answer: ok\n")
    overrides = {"llm": {"script": script}, "plugins": {"dirs": (PLUGINS,)}}
    with two_hosts(tmp_path, redis_url, url, variables, **overrides) as hosts:
        yield hosts


@pytest.fixture
async def services(hosts: TwoHosts) -> AsyncIterator[Services]:
    services = hosts.services()
    await services.start()
    yield services
    await services.close()


async def test_files_and_packages_follow_the_workers(
    hosts: TwoHosts, services: Services, tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "fleet_early", "1.2")
    make_wheel(wheels, "fleet_late", "3.4")
    # Only the first worker has a source of packages.
    sources = [{"PIP_FIND_LINKS": str(wheels)}, {}, {}]
    words, total = "", 0
    for number, (host, source) in enumerate(zip("aba", sources, strict=True), start=1):
        other = "b" if host == "a" else "a"
        await asyncio.to_thread(hosts.start, host, "methods", **source)
        await asyncio.to_thread(hosts.start, other, "rounds")
        report = await run(services, CODE.format(word=str(number), amount=number), "chat")
        words, total = f"{words} {number}".strip(), total + number
        assert report.error is None, hosts.logs()
        said, log = report.output.splitlines()
        assert said.startswith(f"{words} {total} 1.2 3.4 {hosts.data_dirs[host]}/packages/"), hosts.logs()
        assert log == words.replace(" ", "")
        for place in (host, "methods"), (other, "rounds"):
            await asyncio.to_thread(hosts.workers[place].stop)
