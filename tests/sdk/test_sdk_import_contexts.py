"""What ``import`` means in plugins: names of our packages, of other plugins and of files beside them."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loaded_plugins import unload_plugins

import storage
import workers
from nekro.plugins.loader import LoadedPlugins, load_plugins
from nekro_agent.packages import contexts

HEAD = """
from nekro_agent.api.plugin import NekroPlugin
plugin = NekroPlugin("n", "{name}", "d", "1", "Ada", "u")
"""
#: Every way to import a module ``{module}`` that binds ``WHO``.
FORMS = {
    "import": "import {module} as found",
    "from": "from {module} import WHO\nimport {module} as found",
    "plain": "import {module}\nfound = {module}",
    "function": "import importlib\nfound = importlib.import_module('{module}')",
    "from_importlib": "from importlib import import_module\nfound = import_module('{module}')",
    "builtin": "found = __import__('{module}')",
}
#: Names of our packages, of modules of the standard library's style, and one that is nobody's.
NAMES = ("nekro", "storage", "workers", "broker_config", "nekro_client", "utils")

Load = Callable[..., LoadedPlugins]


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def code(name: str, form: str) -> str:
    """A plugin that imports ``{module}`` at its import, in a function, and in a function in a thread."""
    return (
        HEAD.format(name=name) + f"{form}\nat_import = found.WHO\n"
        f"def lazily():\n{indented(form)}    return found.WHO\n"
    )


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    results: list[LoadedPlugins] = []
    before = list(sys.path)

    def run(*paths: Path) -> LoadedPlugins:
        results.append(load_plugins(paths, shipped=False, entry_points=False, data_dir=tmp_path / "data"))
        assert [record.error for record in results[-1].records] == [None] * len(results[-1].records)
        return results[-1]

    yield run
    for result in results:
        unload_plugins(result)
    sys.path[:] = before
    for name in [name for name in sys.modules if name.startswith("nekro_installed.")]:
        del sys.modules[name]


def module_of(loaded: LoadedPlugins, number: int = 0) -> Any:
    return sys.modules[loaded.found[number].module]


def seen(module: Any) -> set[str]:
    """What a plugin sees at import, in a function, in a thread, and in a coroutine."""
    found = [module.at_import, module.lazily()]
    thread = threading.Thread(target=lambda: found.append(module.lazily()))
    thread.start()
    thread.join()

    async def later() -> str:
        return str(module.lazily())

    found.append(asyncio.run(later()))
    return set(found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_plugin_gets_the_module_beside_it(load: Load, tmp_path: Path, name: str, form: str) -> None:
    (tmp_path / f"{name}.py").write_text("WHO = 'beside'")
    (tmp_path / "one_plugin.py").write_text(code("one_plugin", FORMS[form].format(module=name)))
    assert seen(module_of(load(tmp_path / "one_plugin.py"))) == {"beside"}


@pytest.mark.parametrize("form", FORMS)
def test_two_plugins_each_have_their_own_utils(load: Load, tmp_path: Path, form: str) -> None:
    text = FORMS[form].format(module="utils")
    path_first = "import sys, os\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\n"
    path_last = "import sys, pathlib\nsys.path.append(str(pathlib.Path(__file__).parent))\n"
    for name, before in [("first", ""), ("second", path_first), ("third", path_last)]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(before + code(name, text))
        (tmp_path / name / "utils.py").write_text(f"WHO = {name!r}\nimport storage\n")
        (tmp_path / name / "storage.py").write_text("")
    loaded = load(tmp_path)
    assert [seen(module_of(loaded, number)) for number in range(3)] == [{"first"}, {"second"}, {"third"}]
    assert "utils" not in sys.modules and not [path for path in sys.path if str(tmp_path) in path]


@pytest.mark.parametrize("name", NAMES)
def test_a_package_has_modules_of_any_name_relative_and_absolute(
    load: Load, tmp_path: Path, name: str
) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("from .plugin import plugin, at_import, lazily")
    relative = f"from . import {name} as found\nfrom .{name} import WHO"
    (package / "plugin.py").write_text(code("pack", relative))
    (package / f"{name}.py").write_text(
        f"import {name} as absolute\nfrom .deep.inner import WHO\nassert absolute.__name__ == __name__"
    )
    (package / "deep").mkdir()
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "inner.py").write_text(f"from ..other import WHO\nimport pack, {name}")
    (package / "other.py").write_text("WHO = 'own'")
    assert seen(module_of(load(package))) == {"own"}


def test_a_cloned_repository_finds_its_modules_by_every_usual_path(load: Load, tmp_path: Path) -> None:
    repository = tmp_path / "nekro-plugin-thing"
    (repository / "lib" / "workers").mkdir(parents=True)
    (repository / "plugin.py").write_text(
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent / 'lib'))\n"
        + code(
            "thing",
            "import workers.core as core\nfrom workers import core as found\nfrom .storage import MORE",
        )
    )
    (repository / "lib" / "workers" / "__init__.py").write_text("")
    (repository / "lib" / "workers" / "core.py").write_text("from workers.words import WHO\nimport storage\n")
    (repository / "lib" / "workers" / "words.py").write_text("WHO = 'vendored'")
    (repository / "storage.py").write_text("MORE = 1")
    assert seen(module_of(load(repository))) == {"vendored"}
    assert sys.modules["workers"] is workers and sys.modules["storage"] is storage


def test_plugins_named_like_our_packages_replace_none_of_them(load: Load, tmp_path: Path) -> None:
    for name in ("broker_config", "storage", "workers"):
        (tmp_path / f"{name}.py").write_text(HEAD.format(name=name))
    (tmp_path / "nekro").mkdir()
    (tmp_path / "nekro" / "__init__.py").write_text(HEAD.format(name="nekro") + "from nekro.helper import X")
    (tmp_path / "nekro" / "helper.py").write_text("X = 1")
    loaded = load(tmp_path)
    assert [plugin.key for plugin in loaded.plugins] == [
        "Ada.broker_config",
        "Ada.nekro",
        "Ada.storage",
        "Ada.workers",
    ]
    assert sys.modules["workers"] is workers
    assert importlib.import_module("nekro.cli.running").__file__ == str(
        Path(workers.__file__).parents[1] / "nekro" / "cli" / "running.py"
    )


def test_a_plugin_never_gets_our_packages(load: Load, tmp_path: Path) -> None:
    tries = "".join(
        f"try:\n    import {name}\n    got.append({name!r})\nexcept ModuleNotFoundError as exc:\n"
        f'    assert str(exc) == "No module named {name!r}" and exc.name == {name!r}, exc\n'
        for name in NAMES
    )
    (tmp_path / "curious.py").write_text(HEAD.format(name="curious") + "got = []\n" + tries)
    assert module_of(load(tmp_path)).got == []


def test_our_packages_are_found_before_every_entry_of_the_path(load: Load, tmp_path: Path) -> None:
    vendor = tmp_path / "vendor"
    vendor.mkdir()
    (vendor / "broker_config.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "shadow.py").write_text(
        f"import sys\nsys.path.insert(0, {str(vendor)!r})" + HEAD.format(name="shadow")
    )
    load(tmp_path / "shadow.py")
    spec = importlib.util.find_spec("broker_config")
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).parents[1] == Path(workers.__file__).parents[1]


def test_a_dependency_has_its_own_modules_of_our_names(load: Load, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    for package, text in {
        "workers": "from workers.crew import WHO",
        "uses_workers": "import workers\nfrom storage import WHO\n"
        "def lazily():\n    import workers.crew\n    return workers.crew.WHO",
    }.items():
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text(text)
    (site / "workers" / "crew.py").write_text("WHO = 'dependency'")
    (site / "storage.py").write_text("WHO = 'their storage'")
    sys.path.append(str(site))
    contexts.add_installed(folder=site)
    (tmp_path / "user.py").write_text(
        code("user", "import workers as found")
        + "import uses_workers\nboth = uses_workers.workers is found\n"
    )
    module = module_of(load(tmp_path / "user.py"))
    assert seen(module) == {"dependency"} and module.both
    assert (module.uses_workers.WHO, module.uses_workers.lazily()) == ("their storage", "dependency")
    assert sys.modules["workers"] is workers and not hasattr(workers, "WHO")
    assert importlib.import_module(contexts.installed_name("workers")).WHO == "dependency"
    for name in ("uses_workers",):
        del sys.modules[name]


def test_installed_packages_and_the_standard_library_have_priority_over_files_beside(
    load: Load, tmp_path: Path
) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    for name in ("json", "httpx", "nekro_agent"):
        (package / f"{name}.py").write_text("raise RuntimeError('this is meant by relative imports only')")
    (package / "__init__.py").write_text(
        HEAD.format(name="pack") + "import json, httpx\njson.dumps, httpx.get"
    )
    load(package)


def test_a_module_beside_imports_the_plugin_itself_and_not_a_copy(load: Load, tmp_path: Path) -> None:
    (tmp_path / "solo.py").write_text(
        HEAD.format(name="solo")
        + "import helper\nfrom .helper import copy as relative\nsame = helper.copy, relative"
    )
    (tmp_path / "helper.py").write_text(
        "from .solo import plugin as copy\nfrom solo import plugin as again\nassert copy is again"
    )
    loaded = load(tmp_path / "solo.py")
    assert module_of(loaded).same == (loaded.plugins[0], loaded.plugins[0])
