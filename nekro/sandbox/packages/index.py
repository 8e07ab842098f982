"""Access to the package index for builder sandboxes: through the host, wheels only.

A builder has no network. Its installer uses a server inside the sandbox, which requests the page of
a project, or a wheel listed on such a page, from the host over the bridge. So only the host knows the
index's address and credentials, and every download is counted and hashed before the installer gets it.

Source: PEP 503 and PEP 691, the simple repository API.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from nekro_agent.downloads.addresses import AddressPolicy
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import DownloadError, DownloadRefusedError, PackageInstallError
from nekro_agent.tools.task_groups import in_thread
from nekro_client.answer_limits import AnswerTooLargeError, EncodedAnswerError, limited

__all__ = ["IndexGateway"]

_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
_PROJECT: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?")
_PAGE_BYTES: Final = 64 << 20
_MOST_REDIRECTS: Final = 5
_PORTS: Final = {"http": 80, "https": 443}
#: ``html.parser`` takes quadratic time for some pages. The values of links have no ``>`` (PEP 503).
_LINK: Final = re.compile(r"<a\s([^<>]*)>", re.IGNORECASE)
_ATTRIBUTE: Final = re.compile(r"""([\w-]+)(?:\s{0,9}=\s{0,9}(?:"([^"]*)"|'([^']*)'|([^\s"'>]+)))?""")


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
        try:
            async with self._opened(urljoin(self._index_url, f"{name}/"), accept=_ACCEPT) as response:
                if response.status_code == 404:
                    return []
                if response.status_code != 200:
                    raise PackageInstallError(f"the package index answered {response.status_code} for {name}")
                page = bytearray()
                async for chunk in response.aiter_raw():
                    page += chunk
                    if len(page) > _PAGE_BYTES:
                        raise PackageInstallError(f"the page of {name} has more than {_PAGE_BYTES} bytes")
        except httpx.HTTPError as exc:
            raise PackageInstallError(f"the package index does not answer ({_fault(exc)})") from exc
        is_json = "json" in response.headers.get("content-type", "")
        read: Callable[..., list[_Wheel]] = _from_json if is_json else _from_html
        try:
            return await in_thread(read, page.decode("utf-8", "replace"), str(response.url))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as exc:
            raise PackageInstallError(f"the page of {name} is malformed ({type(exc).__name__})") from exc

    async def _download(self, wheel: _Wheel) -> str:
        digest = hashlib.sha256()
        target = self._directory / wheel.filename
        try:
            async with self._opened(wheel.url, accept="*/*") as response:
                response.raise_for_status()
                with target.open("xb") as file:
                    async for chunk in response.aiter_raw():
                        self._take(chunk)
                        digest.update(chunk)
                        file.write(chunk)
        except httpx.HTTPError as exc:
            raise PackageInstallError(f"{wheel.filename} cannot be fetched ({_fault(exc)})") from exc
        if wheel.sha256 and digest.hexdigest() != wheel.sha256:
            raise PackageInstallError(f"{wheel.filename} is not the file of the index: its SHA-256 differs")
        target.chmod(0o444)
        return digest.hexdigest()

    @asynccontextmanager
    async def _opened(self, url: str, *, accept: str) -> AsyncIterator[httpx.Response]:
        """Request a URL of the index, and what it redirects to.

        Raises:
            PackageInstallError: a host is not permitted, or there are too many redirects.
            httpx.HTTPError: there is no proper answer.
        """
        async with httpx.AsyncClient(
            timeout=PROGRAM_SECONDS, follow_redirects=False, event_hooks=limited(None)
        ) as client:
            try:
                request: httpx.Request | None = client.build_request("GET", url, headers={"Accept": accept})
            except httpx.InvalidURL as exc:
                raise PackageInstallError(f"the package index refers to an invalid URL: {exc}") from exc
            for _ in range(_MOST_REDIRECTS + 1):
                assert request is not None  # noqa: S101 - only an answer without a redirect has none
                await self._check(request.url)
                response = await client.send(request, stream=True)
                try:
                    request = response.next_request
                    if request is None:
                        yield response
                        return
                finally:
                    await response.aclose()
        raise PackageInstallError(f"the package index redirects more than {_MOST_REDIRECTS} times")

    async def _check(self, url: httpx.URL) -> None:
        """Admit the index's own address and public ones: not what only this host or its network reaches.

        Raises:
            PackageInstallError: it is another one, or not of HTTP, or without the encryption of the index.
        """
        index = httpx.URL(self._index_url)
        if url.scheme not in _PORTS or (index.scheme == "https" and url.scheme == "http"):
            raise PackageInstallError(f"the package index refers to a URL of {url.scheme}, which is refused")
        if (url.host, _port(url)) == (index.host, _port(index)):
            return
        try:
            await AddressPolicy().resolve(url.host, _port(url))
        except DownloadRefusedError:
            raise PackageInstallError(
                f"the package index refers to {url.host}:{_port(url)}, which is neither its own address nor a"
                " public one; pip must be configured with an index that serves its files itself"
            ) from None
        except DownloadError:
            pass  # the name is not known here: the request fails, or a proxy knows the name

    def _take(self, chunk: bytes) -> None:
        self._bytes_left -= len(chunk)
        if self._bytes_left < 0:
            raise PackageInstallError("the wheels of this package are too large together")


def _fault(exc: httpx.HTTPError) -> str:
    """Return what is wrong, without the URL, which may contain a password."""
    is_ours = isinstance(exc, AnswerTooLargeError | EncodedAnswerError)
    return str(exc) if is_ours else type(exc).__name__


def _port(url: httpx.URL) -> int:
    return url.port or _PORTS[url.scheme]


def _from_json(text: str, base: str) -> list[_Wheel]:
    page: dict[str, Any] = json.loads(text)
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


def _from_html(text: str, base: str) -> list[_Wheel]:
    wheels = []
    for link in _LINK.finditer(text):
        attributes = {
            name.lower(): html.unescape(double or single or bare)
            for name, double, single, bare in _ATTRIBUTE.findall(link[1])
        }
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
