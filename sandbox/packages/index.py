"""Access to the package index for builder sandboxes: through the host, wheels only.

A builder has no network. Its installer uses a server inside the sandbox, which requests the page of
a project, or a wheel listed on such a page, from the host over the bridge. So only the host knows the
index's address and credentials, and every download is counted and hashed before the installer gets it.

Source: PEP 503 and PEP 691, the simple repository API.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import PackageInstallError

__all__ = ["IndexGateway"]

_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
_PROJECT: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?")
_PAGE_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class _Wheel:
    filename: str
    url: str
    sha256: str | None
    requires_python: str | None


class IndexGateway:
    """Fetches pages and wheels of one index for one build."""

    def __init__(self, index_url: str, *, directory: Path, most_bytes: int) -> None:
        """
        Args:
            directory: where wheels are stored; read-only for the builder.
            most_bytes: limit for all wheels of the build together.
        """
        self._index_url = index_url.rstrip("/") + "/"
        self._directory = directory
        self._bytes_left = most_bytes
        self._wheels: list[_Wheel] = []
        #: SHA-256 by file name, for every downloaded wheel.
        self.downloaded: dict[str, str] = {}

    async def page(self, project: str) -> str:
        """Return a project's page as JSON, with links to ``/files/<number>/<name>``.

        Raises:
            PackageInstallError: the name is malformed, or the index does not answer properly.
        """
        name = canonicalize_name(project)
        if not _PROJECT.fullmatch(name):
            raise PackageInstallError(f"{project[:80]!r} is not a project name")
        files = []
        for wheel in await self._wheels_of(name):
            files.append(
                {
                    "filename": wheel.filename,
                    "url": f"/files/{len(self._wheels)}/{wheel.filename}",
                    "hashes": {"sha256": wheel.sha256} if wheel.sha256 else {},
                    "requires-python": wheel.requires_python,
                }
            )
            self._wheels.append(wheel)
        return json.dumps({"meta": {"api-version": "1.0"}, "name": name, "files": files})

    async def wheel(self, number: int) -> str:
        """Download a wheel that a page listed; returns its file name in the directory.

        Raises:
            PackageInstallError: no page listed it, it is too large, or its hash differs.
        """
        if not 0 <= number < len(self._wheels):
            raise PackageInstallError(f"no page lists a wheel {number}")
        wheel = self._wheels[number]
        if wheel.filename not in self.downloaded:
            self.downloaded[wheel.filename] = await self._download(wheel)
        return wheel.filename

    async def _wheels_of(self, name: str) -> list[_Wheel]:
        url = urljoin(self._index_url, f"{name}/")
        try:
            async with httpx.AsyncClient(timeout=PROGRAM_SECONDS, follow_redirects=True) as client:
                response = await client.get(url, headers={"Accept": _ACCEPT})
        except httpx.HTTPError as exc:
            raise PackageInstallError(f"the package index does not answer ({type(exc).__name__})") from exc
        if response.status_code == 404:
            return []
        if response.status_code != 200 or len(response.content) > _PAGE_BYTES:
            raise PackageInstallError(f"the package index answered {response.status_code} for {name}")
        if "json" in response.headers.get("content-type", ""):
            return _from_json(response.json(), base=str(response.url))
        return _from_html(response.text, base=str(response.url))

    async def _download(self, wheel: _Wheel) -> str:
        digest = hashlib.sha256()
        target = self._directory / wheel.filename
        try:
            async with (
                httpx.AsyncClient(timeout=PROGRAM_SECONDS, follow_redirects=True) as client,
                client.stream("GET", wheel.url) as response,
            ):
                response.raise_for_status()
                with target.open("xb") as file:
                    async for chunk in response.aiter_bytes():
                        self._take(chunk)
                        digest.update(chunk)
                        file.write(chunk)
        except httpx.HTTPError as exc:
            raise PackageInstallError(f"{wheel.filename} cannot be fetched ({type(exc).__name__})") from exc
        if wheel.sha256 and digest.hexdigest() != wheel.sha256:
            raise PackageInstallError(f"{wheel.filename} is not the file of the index: its SHA-256 differs")
        target.chmod(0o444)
        return digest.hexdigest()

    def _take(self, chunk: bytes) -> None:
        self._bytes_left -= len(chunk)
        if self._bytes_left < 0:
            raise PackageInstallError("the wheels of this package are too large together")


def _from_json(page: Mapping[str, Any], *, base: str) -> list[_Wheel]:
    wheels = [
        _Wheel(
            filename=str(file["filename"]),
            url=urljoin(base, str(file["url"])),
            sha256=file.get("hashes", {}).get("sha256"),
            requires_python=file.get("requires-python"),
        )
        for file in page.get("files", ())
        if not file.get("yanked")
    ]
    return [wheel for wheel in wheels if _is_wheel(wheel.filename)]


def _from_html(text: str, *, base: str) -> list[_Wheel]:
    parser = _Links()
    parser.feed(text)
    wheels = []
    for attributes in parser.links:
        href = attributes.get("href")
        if not href or "data-yanked" in attributes:
            continue
        url, fragment = urldefrag(urljoin(base, href))
        filename = unquote(urlsplit(url).path.rpartition("/")[2])
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        wheels.append(
            _Wheel(
                filename=filename,
                url=url,
                sha256=sha256,
                requires_python=attributes.get("data-requires-python"),
            )
        )
    return [wheel for wheel in wheels if _is_wheel(wheel.filename)]


def _is_wheel(filename: str) -> bool:
    if "/" in filename or not filename.isprintable():
        return False
    try:
        parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return False
    return True


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links.append(dict(attrs))
