"""Packages for sandboxed code, from generated wheels and an index on loopback."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gzip
import hashlib
import http.server
import os
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import Areas, Lab, method
from waiting import WAIT_SECONDS

from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import StopType
from nekro.sandbox.packages.index import IndexGateway
from nekro.sandbox.packages.layers import Built, LayerPublisher, check_policy, parse_requirement
from nekro_agent.errors import PackageInstallError

pytestmark = pytest.mark.extended


def write_wheel(
    directory: Path, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()
) -> Path:
    """Build a wheel by hand, offline."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {item}\n" for item in requires)
    everything = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={_record_hash(text)},{len(text.encode())}\n" for path, text in everything.items()
    )
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**everything, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(member, text)
    return path


def _record_hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, format: str, *args: object) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]


@dataclass(kw_only=True)
class Index:
    """A simple index of wheels."""

    root: Path
    url: str
    requests: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()) -> Path:
        project = self.root / "simple" / name
        project.mkdir(parents=True, exist_ok=True)
        wheel = write_wheel(project, name, version, files, requires)
        self.write_page(name)
        return wheel

    def write_page(self, name: str) -> None:
        project = self.root / "simple" / name
        links = [
            f'<a href="{wheel.name}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}">{wheel.name}</a>'
            for wheel in sorted(project.glob("*.whl"))
        ]
        # Not a wheel: must not be offered.
        links.append(f'<a href="{name}-9.9.tar.gz">{name}-9.9.tar.gz</a>')
        (project / "index.html").write_text("<html><body>" + "\n".join(links) + "</body></html>")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    root = tmp_path / "index"
    (root / "simple").mkdir(parents=True)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(root))
    )
    server.requests = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    made = Index(root=root, url=f"http://127.0.0.1:{server.server_port}/simple", requests=server.requests)  # type: ignore[attr-defined]
    made.add("alpha", "1.0", {"alpha.py": "import beta\nVALUE = beta.BASE + 1\n"}, ["beta>=1"])
    made.add("beta", "2.0", {"beta/__init__.py": "BASE = 41\n"})
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def shop(index: Index, bwrap_driver: BwrapDriver, tmp_path: Path) -> AsyncIterator[Lab]:
    """A lab that may install everything from the index."""
    settings = SandboxSettings(package_allow=["*"], package_index=index.url)
    areas = Areas(root=tmp_path / "data")
    manager = SandboxManager(settings, areas, packages_dir=tmp_path / "layers", driver=bwrap_driver)
    await manager.start()
    yield Lab(settings=settings, areas=areas, manager=manager)
    await manager.close()


async def test_package_is_built_for_the_next_run_and_mounted_read_only(shop: Lab, index: Index) -> None:
    first = await shop.run("dynamic_importer('alpha>=1')")
    assert first.error is not None
    assert first.error.startswith("ImportError: alpha 1.0 has been installed")
    code = """
import os
alpha = dynamic_importer('alpha>=1')
import beta
print(alpha.VALUE, alpha.__file__, beta.BASE)
for path in (alpha.__file__, os.path.dirname(alpha.__file__) + '/planted.py'):
    for attempt in (lambda: open(path, 'a'), lambda: os.chmod(path, 0o777), lambda: os.unlink(path)):
        try:
            attempt()
            print('changed', path)
        except OSError as exc:
            pass
print(os.statvfs(alpha.__file__).f_flag & os.ST_RDONLY)
"""
    second = await shop.run(code)
    # The last line is attack F13: a layer cannot be written.
    assert second.output == "42 /opt/layers/0/alpha.py 41\n1\n"
    assert second.stop_type is StopType.NORMAL


async def test_attack_F13_layer_on_disk_is_unchanged_after_a_run_that_attacked_it(shop: Lab) -> None:
    await shop.run("dynamic_importer('beta')")
    before = layer_contents(shop)
    await shop.run(
        "import beta, os, shutil\nshutil.rmtree(os.path.dirname(beta.__file__), ignore_errors=True)\n"
        "open('/opt/layers/0/json.py', 'w')"
    )
    assert layer_contents(shop) == before


def layer_contents(shop: Lab) -> dict[str, str]:
    layers = shop.areas.root.parent / "layers" / "layers"
    return {str(path): path.read_text() for path in layers.rglob("*.py")}


async def test_the_event_loop_goes_on_while_a_layer_is_published(
    shop: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package may have a gibibyte and a hundred thousand files, and others' runs share the loop."""
    loop, has_gone_on, publish = asyncio.get_running_loop(), threading.Event(), LayerPublisher.publish

    def waiting(*args: Any, **kwargs: Any) -> Built:
        loop.call_soon_threadsafe(has_gone_on.set)
        assert has_gone_on.wait(WAIT_SECONDS)
        return publish(*args, **kwargs)

    monkeypatch.setattr(LayerPublisher, "publish", waiting)
    result = await shop.run("dynamic_importer('beta')")
    assert result.error is not None and "beta 2.0 has been installed" in result.error


async def test_layer_is_built_once_and_chosen_per_container(shop: Lab, index: Index) -> None:
    await shop.run("dynamic_importer('beta')", chat_key="one")
    count = len(index.requests)
    unasked = await shop.run("import beta", chat_key="two")
    assert unasked.error == "ModuleNotFoundError: No module named 'beta'"
    asked = await shop.run("dynamic_importer('beta')", chat_key="two")
    assert asked.error is not None
    assert "has been installed" in asked.error
    assert len(index.requests) == count
    assert (await shop.run("import beta; print(beta.BASE)", chat_key="two")).output == "41\n"


async def test_available_module_is_imported_at_once(shop: Lab, index: Index) -> None:
    result = await shop.run("print(dynamic_importer('json').__name__)")
    assert (result.output, index.requests) == ("json\n", [])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gamma", "No matching distribution found for gamma"),
        ("beta @ http://127.0.0.1/beta.whl", "only a name and versions"),
        ("beta[extra]", "only a name and versions"),
        ("beta; python_version>'3'", "only a name and versions"),
        ("../beta", "is not a package name"),
        ("--index-url=http://evil", "is not a package name"),
        ("beta\n--pre", "is not a package name"),
        ("x" * 300, "at most 200 characters"),
    ],
)
async def test_invalid_request_is_an_error_with_its_reason(shop: Lab, spec: str, words: str) -> None:
    result = await shop.run(f"dynamic_importer({spec!r})")
    assert result.error is not None
    assert result.error.startswith("MethodError: PackageInstallError")
    assert words in result.error


@pytest.mark.parametrize("value", [5, None, ["beta"], {"a": 1}])
async def test_request_of_another_type_is_refused(shop: Lab, value: object) -> None:
    result = await shop.run(f"dynamic_importer({value!r}, import_name='nothing')")
    assert result.error == "TypeError: dynamic_importer takes one package name"


async def test_wheel_that_differs_from_the_index_is_refused(shop: Lab, index: Index) -> None:
    wheel = index.add("delta", "1.0", {"delta.py": ""})
    write_wheel(wheel.parent, "delta", "1.0", {"delta.py": "EVIL = 1\n"})
    result = await shop.run("dynamic_importer('delta')")
    assert result.error is not None
    assert "its SHA-256 differs" in result.output or "cannot be installed" in result.error
    assert LayerPublisher(shop.areas.root.parent / "layers").find(parse_requirement("delta")) is None


async def test_without_a_directory_there_are_no_packages(box: Lab) -> None:
    result = await box.run("dynamic_importer('beta')")
    assert result.error == "MethodError: PackageInstallError: this service offers no packages"


async def test_builder_has_no_access_to_chats_and_network(shop: Lab, index: Index) -> None:
    index.add(
        "nosy",
        "1.0",
        {"nosy.py": "", "nosy-1.0.data/scripts/run": "", "sitecustomize.py": "raise SystemExit('ran')\n"},
    )
    result = await shop.run("dynamic_importer('nosy')")
    # Nothing of a wheel runs during its installation, so only the success can be checked.
    assert result.error is not None
    assert "has been installed" in result.error
    after = await shop.run("import nosy, sys; print('sitecustomize' in sys.modules)")
    assert after.output == "False\n"


def test_policy_may_be_off_or_an_allow_list() -> None:
    beta = parse_requirement("Beta_Package >= 2")
    assert str(beta) == "beta-package>=2"
    with pytest.raises(PackageInstallError, match="disabled"):
        check_policy(beta, SandboxSettings())
    listed = SandboxSettings(package_allow=["beta.package"])
    check_policy(beta, listed)
    with pytest.raises(PackageInstallError, match="allowed: beta-package"):
        check_policy(parse_requirement("gamma"), listed)


@pytest.mark.parametrize("project", ["../../etc", "a/b", "", "x" * 200, "a b", "é"])
async def test_index_receives_project_names_only(tmp_path: Path, index: Index, project: str) -> None:
    gateway = IndexGateway(index.url, directory=tmp_path, most_bytes=1000)
    with pytest.raises(PackageInstallError, match="is not a project name"):
        await gateway.page(project)
    assert index.requests == []


async def test_downloads_are_counted_over_all_wheels(tmp_path: Path, index: Index) -> None:
    gateway = IndexGateway(index.url, directory=tmp_path, most_bytes=200)
    await gateway.page("beta")
    with pytest.raises(PackageInstallError, match="too large together"):
        await gateway.wheel(0)
    with pytest.raises(PackageInstallError, match="no page lists"):
        await gateway.wheel(7)


class TableServer(http.server.ThreadingHTTPServer):
    """Answers requests from a table: headers and body by path; a header ``Location`` makes a redirect."""

    def __init__(self, answers: Mapping[str, tuple[Mapping[str, str], bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), TableHandler)
        self.answers = answers
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class TableHandler(QuietHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, TableServer)
        headers, body = self.server.answers[self.path]
        self.send_response(302 if "Location" in headers else 200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)


@contextlib.contextmanager
def table_server(answers: Mapping[str, tuple[Mapping[str, str], bytes]]) -> Iterator[TableServer]:
    with TableServer(answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def inner() -> Iterator[TableServer]:
    """A server of this host that is no part of the index."""
    with table_server({"/simple/page/": ({}, b""), "/w-1.0-py3-none-any.whl": ({}, b"")}) as server:
        yield server


@pytest.fixture
def strange(inner: TableServer) -> Iterator[TableServer]:
    """An index that refers to the inner server, and whose pages are too long."""
    link = f'<A HREF="{inner.url}/w-1.0-py3-none-any.whl">w</A>'.encode()
    answers: dict[str, tuple[Mapping[str, str], bytes]] = {
        "page": ({"Location": f"{inner.url}/simple/page/"}, b""),
        "file": ({"Location": "file:///etc/passwd"}, b""),
        "circle": ({"Location": "/simple/circle/"}, b""),
        "moved": ({"Location": "/simple/wheel/"}, b""),
        "wheel": ({"Content-Type": "text/html"}, link),
        "packed": ({"Content-Encoding": "gzip"}, gzip.compress(bytes(65 << 20))),
        "long": ({}, bytes(65 << 20)),
        "broken": ({"Content-Type": "application/json"}, b'{"files": [{}]}'),
    }
    with table_server({f"/simple/{name}/": answer for name, answer in answers.items()}) as server:
        yield server


@pytest.mark.parametrize(
    ("project", "error"),
    [
        ("page", "neither its own address nor a public one; pip must be configured"),
        ("file", "a URL of file, which is refused|does not answer"),
        ("circle", "redirects more than 5 times"),
        ("packed", "answers with more than 67108864 bytes"),
        ("long", "more than 67108864 bytes"),
        ("broken", "malformed"),
    ],
)
async def test_an_index_does_not_lead_elsewhere_and_its_pages_are_bounded(
    tmp_path: Path, strange: TableServer, inner: TableServer, project: str, error: str
) -> None:
    gateway = IndexGateway(f"{strange.url}/simple", directory=tmp_path, most_bytes=1000)
    with pytest.raises(PackageInstallError, match=error):
        await gateway.page(project)
    assert inner.requests == []


async def test_a_wheel_of_an_inner_address_is_not_fetched(
    tmp_path: Path, strange: TableServer, inner: TableServer
) -> None:
    gateway = IndexGateway(f"{strange.url}/simple", directory=tmp_path, most_bytes=1000)
    assert "w-1.0-py3-none-any.whl" in await gateway.page("moved")  # a redirect within the index
    with pytest.raises(PackageInstallError, match="neither its own address nor a public one"):
        await gateway.wheel(0)
    assert inner.requests == []


def test_publishing_accepts_regular_files_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg" / "__init__.py").write_text("x = 1")
    (source / "link.py").symlink_to("/etc/passwd")
    os.mkfifo(source / "fifo.py")
    store = LayerPublisher(tmp_path / "layers")
    requirement = parse_requirement("pkg")
    built = store.publish(source, requirement, version="1", wheels={}, most_bytes=1000)
    assert built.modules == ("pkg",)
    assert sorted(path.name for path in store.path(built.digest).rglob("*")) == ["__init__.py", "pkg"]
    assert store.find(requirement) == built


def test_container_has_a_bounded_number_of_layers(tmp_path: Path) -> None:
    store = LayerPublisher(tmp_path)
    for number in range(32):
        store.path(f"d{number}").mkdir(parents=True)
        store.choose("box", f"d{number}")
    store.path("more").mkdir()
    store.choose("box", "d0")
    with pytest.raises(PackageInstallError, match="no more can be added"):
        store.choose("box", "more")
    assert len(store.chosen("box")) == 32


async def test_method_named_like_the_package_installer_does_not_replace_it(shop: Lab) -> None:
    shop.handlers["dynamic_importer"] = lambda *args: ["from the plugin", *args]
    bundled = method("dynamic_importer", path="KroMiose.dynamic_importer.dynamic_importer")
    result = await shop.run(
        "print(dynamic_importer('json').__name__, KroMiose.dynamic_importer.dynamic_importer('x'))",
        methods=[bundled],
    )
    assert result.output == "json ['from the plugin', 'x']\n"
    await shop.run("dynamic_importer('alpha>=1')", methods=[bundled])
    installed = await shop.run("print(dynamic_importer('alpha>=1').__name__)", methods=[bundled])
    assert installed.output == "alpha\n"


async def test_a_run_grants_no_token_of_the_host(shop: Lab) -> None:
    from nekro_agent.errors import SandboxError

    with pytest.raises(SandboxError, match=r"'host:dynamic_importer' of alice\.tools\.x is one of the host"):
        await shop.run("", methods=[method("host:dynamic_importer", path="alice.tools.x")])
