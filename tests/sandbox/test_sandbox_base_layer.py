"""The base layer: what `make install` built works inside, and changes of a layer are atomic."""

from __future__ import annotations

import hashlib
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import Lab, lab
from test_sandbox_packages import write_wheel

from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.models import StopType
from nekro.sandbox.packages import base_build
from nekro.sandbox.packages.base import named_packages, read_base
from nekro.sandbox.packages.base_build import add_packages, build_base, remove_packages
from nekro_agent.errors import PackageInstallError

pytestmark = pytest.mark.extended

#: Ordinary use of each package; `attempt` reports what fails.
USE = """
import warnings
warnings.simplefilter("error")
import numpy, pandas, openpyxl, dateutil.parser
import matplotlib
assert "matplotlib.pyplot" not in sys.modules
from matplotlib import pyplot as plt
from PIL import Image

frame = pandas.DataFrame({"城市": ["北京", "東京", "서울"], "amount": [1.5, 2, None]})

def picture():
    Image.new("RGB", (60, 40), "red").resize((30, 20)).save("/app/shared/small.jpg")
    return Image.open("/app/shared/small.jpg").size

def sheet():
    frame.to_excel("/app/shared/table.xlsx", index=False)
    return pandas.read_excel("/app/shared/table.xlsx").shape

def glyphs():
    figure, axes = plt.subplots(figsize=(300, 3))  # bounded when it is saved
    axes.bar(frame["城市"], frame["amount"].fillna(0))
    axes.set_title("売上 销售额 매출 −1")
    figure.canvas.draw  # drawn at show; a missing glyph is a warning, which is an error here
    plt.show()
    return plt.get_fignums()

def font_list():
    name = os.listdir("/tmp/matplotlib")[0]
    layer = next(p for p in sys.path if p.startswith("/opt/layers/"))
    same = open(f"/tmp/matplotlib/{name}").read() == open(f"{layer}/../matplotlib/{name}").read()
    return name.startswith("fontlist"), same

def own_file():
    plt.figure().add_subplot().plot([1, 2])
    plt.savefig("/app/shared/mine.png")

def write_layer():
    open(numpy.__file__, "ab")

attempt("solve", lambda: float(numpy.linalg.solve([[2.0]], [4.0])[0]))
attempt("random", lambda: numpy.random.default_rng(1).normal(size=(50, 50)).dot(numpy.ones(50)).shape)
attempt("group", lambda: frame.groupby("城市")["amount"].sum().shape)
attempt("csv", lambda: pandas.read_csv("/app/uploads/t.csv").shape)
attempt("zone", lambda: str(pandas.Timestamp("2026-05-04", tz="Asia/Tokyo").utcoffset()))
attempt("date", lambda: dateutil.parser.parse("4 May 2026").isoformat())
attempt("sheet", sheet)
attempt("picture", picture)
attempt("backend", matplotlib.get_backend)
attempt("glyphs", glyphs)
attempt("font list", font_list)
attempt("own file", own_file)
print(frame)
print(pandas.DataFrame([range(500)] * 5000))
# What the packages do not need is refused while they are loaded.
attempt("write layer", write_layer)
attempt("internet", lambda: socket.socket(socket.AF_INET))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK))
attempt("ptrace", lambda: syscall(101, 0, 0, 0, 0))
attempt("bpf", lambda: syscall(321, 0, 0, 0))
attempt("userfaultfd", lambda: syscall(323, 0))
attempt("keyctl", lambda: syscall(250, 0, 0, 0, 0, 0))
attempt("io_uring", lambda: syscall(425, 1, 0))
attempt("pages", lambda: syscall(279, 0, 0, 0, 0, 0, 0))
plt.figure().add_subplot().plot([3, 1])
"""


@pytest.mark.parametrize("fork_server", [True, False], ids=["forked", "cold"])
async def test_the_default_packages_work_and_their_figures_are_sent(
    tmp_path: Path, x86_64: None, fork_server: bool
) -> None:
    async with lab(tmp_path, fork_server=fork_server) as box:
        await check_default_packages(box)


async def check_default_packages(box: Lab) -> None:
    assert read_base(box.settings) is not None, "run `make install`: it builds the layer"
    sent: list[str] = []
    box.handlers["send_msg_file"] = lambda chat_key, path: sent.append(path)
    box.areas.uploads_dir("chat").joinpath("t.csv").write_text("a,b\n1,2\n3,4\n")
    output: list[str] = []
    forked = box.settings.fork_server
    # A template has imported it, and has the list of fonts in memory.
    use = USE.replace('assert "matplotlib.pyplot" not in sys.modules\n', "") if forked else USE
    attempts = await box.attempts(use, on_output=output.append)
    done = {name: said for name, (how, said, _) in attempts.items() if how == "done"}
    assert done == {
        "solve": "2.0", "random": "(50,)", "group": "(3,)", "csv": "(2, 2)", "zone": "'9:00:00'",
        "date": "'2026-05-04T00:00:00'", "sheet": "(3, 2)", "picture": "(30, 20)", "backend": "'agg'",
        "glyphs": "[]", "own file": "None", **({} if forked else {"font list": "(True, True)"}),
    }  # fmt: skip
    # The one that the program saved itself is not sent.
    assert sent == ["/app/shared/figure-1.png", "/app/shared/figure-2.png"]
    assert {path.name for path in box.shared().glob("*.png")} == {
        "figure-1.png", "figure-2.png", "mine.png"
    }  # fmt: skip
    wide = (box.shared() / "figure-1.png").read_bytes()
    assert int.from_bytes(wide[16:20], "big") <= 3000
    lines = "".join(output).splitlines()
    assert max(map(len, lines)) <= 150
    assert len(lines) < 60
    assert any(line.endswith("and sent to the chat]") for line in lines)


async def test_figures_are_bounded_in_number_and_kept_where_they_cannot_be_sent(box: Lab) -> None:
    box.handlers["send_msg_file"] = lambda *_: 1 / 0
    code = "from matplotlib import pyplot as plt\nfor n in range(10):\n    plt.figure().text(0, 0, 'x')\n"
    result = await box.run(code)
    assert result.stop_type is StopType.NORMAL
    assert result.output.count("but not sent: ") == 8
    assert result.output.count("more figures were not saved") == 1
    assert len(list(box.shared().iterdir())) == 8


async def test_without_a_layer_code_runs_as_before(bwrap_driver: BwrapDriver, tmp_path: Path) -> None:
    async with lab(tmp_path, use=bwrap_driver, packages_dir=tmp_path / "none") as box:
        attempts = await box.attempts(
            "import json, sys\nattempt('numpy', lambda: __import__('numpy'))\n"
            "attempt('path', lambda: [p for p in sys.path if 'layers' in p])\n"
        )
    assert attempts["numpy"][1] == "ModuleNotFoundError"
    assert attempts["path"] == ["done", "[]", None]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SandboxSettings, str, Path]:
    """A layer with a default set of one package: settings, arguments of pip, directory of wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = write_wheel(wheels, "alpha", "1.0", {"alpha.py": "VALUE = 1\n"})
    pins = tmp_path / "default.txt"
    pins.write_text(f"alpha==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    monkeypatch.setattr(base_build, "_DEFAULTS", pins)
    monkeypatch.setattr(base_build, "_NAMES", tmp_path / "default.in")
    (tmp_path / "default.in").write_text("alpha\n")
    settings = SandboxSettings(packages_dir=tmp_path / "layer")
    return settings, f"--no-index --find-links {wheels}", wheels


def test_a_change_makes_a_new_version_and_a_failed_one_changes_nothing(small: Any) -> None:
    settings, pip, wheels = small
    assert build_base(settings, pip_arguments=pip)
    assert not build_base(settings, pip_arguments="--no-such-option")  # nothing is to do
    first = read_base(settings)
    assert first is not None and named_packages(settings) == "alpha 1.0"
    write_wheel(wheels, "beta", "2.0", {"beta.py": "import gamma\n"}, ["gamma", "alpha"])
    write_wheel(wheels, "gamma", "3.0", {"gamma.py": ""})
    assert add_packages(settings, ["beta"], pip_arguments=pip)
    second = read_base(settings)
    assert second is not None and second.path != first.path
    assert dict(second.packages) == {"alpha": "1.0", "beta": "2.0", "gamma": "3.0"}
    assert named_packages(settings) == "alpha 1.0, beta 2.0"
    # A sandbox that has the old one mounted keeps its files.
    assert (first.path / f"python{first.python}" / "alpha.py").is_file()
    before = sorted(path.name for path in second.path.parent.iterdir())
    for names, message in (
        (["delta"], "No matching distribution"),
        (["alpha==1.0"], "default set already"),
        (["alpha @ https://example.org/a.whl"], "only a name and versions"),
    ):
        with pytest.raises(PackageInstallError, match=message):
            add_packages(settings, names, pip_arguments=pip)
    (wheels / "beta-2.0-py3-none-any.whl").write_bytes(b"another content, so another hash")
    with pytest.raises(PackageInstallError):
        add_packages(settings, ["gamma"], pip_arguments=pip)  # builds all of it anew
    with pytest.raises(PackageInstallError, match="alpha is in the default set"):
        remove_packages(settings, ["alpha"], pip_arguments=pip)
    assert read_base(settings) == second
    assert sorted(path.name for path in second.path.parent.iterdir()) == before
    assert remove_packages(settings, ["beta"], pip_arguments=pip)
    third = read_base(settings)
    assert third is not None and dict(third.packages) == {"alpha": "1.0"}


def test_modules_are_compiled_without_forks_of_the_building_process(small: Any, tmp_path: Path) -> None:
    """A fork inherits connections and runs hooks of libraries: one of kombu waited for ever for Redis."""
    settings, pip, wheels = small
    write_wheel(wheels, "broken", "1.0", {"broken.py": "def (\n", "whole.py": "VALUE = 1\n"})
    build_base(settings, pip_arguments=pip)
    forked = tmp_path / "forked"

    # The hook is kept as long as this function, its key.
    def note() -> None:
        forked.touch()

    register_after_fork(note, lambda hook: hook())
    assert add_packages(settings, ["broken"], pip_arguments=pip)
    layer = read_base(settings)
    assert layer is not None
    compiled = {path.name.partition(".")[0] for path in layer.path.rglob("*.pyc")}
    assert {"alpha", "whole"} <= compiled and "broken" not in compiled
    assert not forked.exists()


def test_a_source_distribution_is_not_built(small: Any) -> None:
    settings, pip, wheels = small
    build_base(settings, pip_arguments=pip)
    (wheels / "omega-1.0.tar.gz").write_bytes(b"its setup.py would run on the host")
    with pytest.raises(PackageInstallError, match="No matching distribution"):
        add_packages(settings, ["omega"], pip_arguments=pip)


def test_an_unfinished_version_is_removed_and_another_python_sees_none(small: Any) -> None:
    settings, pip, _ = small
    build_base(settings, pip_arguments=pip)
    layer = read_base(settings)
    assert layer is not None
    killed = layer.path.parent / "20260101-000000-killed"
    killed.mkdir()
    (layer.path / f"python{layer.python}").rename(layer.path / "python2.7")
    assert read_base(settings) is None
    assert read_base(SandboxSettings(packages_dir=settings.packages_dir, python="/usr/bin/python3")) is None
    build_base(settings, pip_arguments=pip)
    assert not killed.exists() and read_base(settings) is not None
