"""The distribution `nekro-client`: it works without the packages of workers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from scripted_server import json_answer, scripted

from nekro_client import models

ROOT = Path(__file__).parent.parent.parent
USE = """
import sys
from nekro_client import AsyncClient, Client
from nekro_client.models import Turn
assert not {"celery", "redis", "sqlalchemy", "nekro_agent", "workers", "fastapi"} & set(sys.modules)
print(len(Client(sys.argv[1], key="").methods()))
"""


def closure(*names: str) -> set[str]:
    """The distributions and what they require, without extras."""
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        required = [r for r in distribution(name).requires or [] if "extra ==" not in r and ";" not in r]
        todo += [re.split(r"[^A-Za-z0-9_.-]", r)[0] for r in required]
    return seen


@pytest.mark.extended
def test_the_wheel_works_with_httpx_and_pydantic_alone(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT / "nekro_client", check=True, capture_output=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    wheel = tmp_path / f"nekro_client-{version}-py3-none-any.whl"
    site = tmp_path / "site"
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "nekro_client").rglob("*.py")}
    built = {str(path.relative_to(site)) for path in (site / "nekro_client").rglob("*") if path.is_file()}
    assert built == modules | {"nekro_client/py.typed"}
    for name in closure("httpx", "pydantic") | {"typing-extensions"}:
        for file in distribution(name).files or []:
            top = file.parts[0]
            target = site / top
            if top not in ("..", "__pycache__") and not target.exists():
                target.symlink_to(Path(str(distribution(name).locate_file(top))))
    with scripted(json_answer('{"items": []}')) as server:
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path[:0] = [{str(site)!r}]\n{USE}",
            server.url,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_the_distribution_states_what_the_project_states() -> None:
    own = tomllib.loads((ROOT / "nekro_client" / "pyproject.toml").read_text("utf-8"))["project"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for name in ("license", "requires-python", "authors"):
        assert own[name] == project[name]
    assert set(own["dependencies"]) <= set(project["dependencies"])


def test_models_load_no_httpx() -> None:
    source = (
        "import sys\n"
        "import nekro_client.models, nekro_client.errors, nekro_client.sse\n"
        "print('httpx' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"False\n"


def test_models_of_other_topics_are_not_imported() -> None:
    source = (
        "import sys\n"
        "from nekro_client.models import CallBody\n"
        "names = ('base', 'calls', 'keys')\n"
        "print([name for name in names if f'nekro_client.models.{name}' in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"['base', 'calls']\n"


def test_each_model_is_found_when_it_is_used() -> None:
    folder = ROOT / "nekro_client" / "models"
    public = {
        name
        for path in folder.glob("[!_]*.py")
        for name in import_module(f"nekro_client.models.{path.stem}").__all__
    }
    assert public | {"EventType"} == set(models.__all__)
    assert all(getattr(models, name) is not None for name in models.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Calls'"):
        _ = models.Calls


def test_public_names_are_found_when_they_are_used() -> None:
    import nekro_client

    assert all(getattr(nekro_client, name).__name__ == name for name in nekro_client.__all__)
    assert nekro_client.models.__name__ == "nekro_client.models"
    assert set(nekro_client.__all__) <= set(dir(nekro_client))
    with pytest.raises(AttributeError, match="no attribute 'Clients'"):
        _ = nekro_client.Clients


def test_the_synchronous_modules_are_what_the_script_writes() -> None:
    script = [sys.executable, "scripts/sync_client.py", "--check"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
