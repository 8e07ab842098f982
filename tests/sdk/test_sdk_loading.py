"""Finding and importing plugins."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loaded_plugins import unload_plugins
from waiting import WAIT_SECONDS

from nekro.plugins.discovery import SourceKind, discover
from nekro.plugins.loader import LoadedPlugins, PluginStatus, load_plugins
from nekro_agent.runtime import CoreConfig, ModelConfigGroup, PackagePolicy

#: The command that installs a package, with and without pip in this environment.
_HERE = re.escape(sys.executable)
INSTALL = f"({_HERE} -m pip install|uv pip install --python {_HERE})"
PLUGIN = '''
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
plugin = NekroPlugin("n", "{name}", "d", "2.0", "{author}", "u")

@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "label")
async def {name}_method(ctx):
    """Doc."""
    return "{name}"
'''

Load = Callable[..., LoadedPlugins]


def source(name: str, author: str = "Ada", extra: str = "") -> str:
    return PLUGIN.format(name=name, author=author) + extra


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    results: list[LoadedPlugins] = []

    def run(*dirs: Path, **options: Any) -> LoadedPlugins:
        options = {"shipped": False, "entry_points": False, "data_dir": tmp_path / "data", **options}
        results.append(load_plugins(dirs or (tmp_path / "plugins",), **options))
        return results[-1]

    (tmp_path / "plugins").mkdir()
    yield run
    for result in results:
        unload_plugins(result)


@pytest.fixture
def folder(tmp_path: Path, load: Load) -> Path:
    return tmp_path / "plugins"


def statuses(loaded: LoadedPlugins) -> dict[str, PluginStatus]:
    return {record.key: record.status for record in loaded.records}


def test_a_named_path_may_be_a_file_a_package_or_a_repository(load: Load, folder: Path) -> None:
    (folder / "one.py").write_text(source("one"))
    (folder / "two").mkdir()
    (folder / "two" / "__init__.py").write_text(source("two"))
    (folder / "three-repo").mkdir()
    (folder / "three-repo" / "plugin.py").write_text(source("three"))
    for path, kind in [("one.py", "file"), ("two", "package"), ("three-repo", "root_file")]:
        (found,) = discover(folder / path)
        assert found.kind is SourceKind(kind)
    loaded = load(folder / "one.py", folder / "two", folder / "three-repo")
    assert statuses(loaded) == {f"Ada.{n}": PluginStatus.OK for n in ("one", "two", "three")}
    assert [record.version for record in loaded.records] == ["2.0"] * 3


def test_files_without_a_plugin_are_not_imported(load: Load, folder: Path) -> None:
    (folder / "helper.py").write_text("raise RuntimeError('imported')")
    (folder / "_draft.py").write_text(source("draft"))
    (folder / "tests").mkdir()
    (folder / "tests" / "case.py").write_text(source("case"))
    (folder / "notes.txt").write_text("plugin = 1")
    assert load().records == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("plugin = (", "bad.py, line 1: SyntaxError"),
        (
            "import no_such_package\nplugin = 1",
            " no_such_package; or let the plugin call dynamic_import_pkg('no_such_package')",
        ),
        ("plugin = 42", "`plugin` is int; it must be the NekroPlugin instance"),
        ("x = 1\nraise ValueError('broken on purpose')\nplugin = 1", "bad.py, line 2: ValueError: broken on"),
        ("import sys\nsys.exit('bye')\nplugin = 1", "SystemExit: bye"),
        (source("bad").replace('"bad", "d"', '"1bad", "d"'), "module_name='1bad' must be letters"),
        ("plugin = None\ndef f(:\n  pass", "bad.py, line 2: SyntaxError"),
        ("plugin = " + "-" * 200_000 + "1", "bad.py: SyntaxError: "),
        ("plugin = a" + ".b" * 100_000, "bad.py: SyntaxError: "),
        ("plugin = 1\0", "bad.py: SyntaxError: source code string cannot contain null bytes"),
        (
            source("bad") + "\nimport asyncio; plugin.store.get(store_key='k').send(None)",
            "not at import time",
        ),
        (source("bad") + "\n@plugin.mount_config()\nclass C: pass", "derives from ConfigBase"),
    ],
)
def test_a_plugin_that_fails_is_reported_and_the_others_load(
    load: Load, folder: Path, text: str, error: str
) -> None:
    (folder / "bad.py").write_text(text)
    (folder / "good.py").write_text(source("good"))
    loaded = load()
    assert statuses(loaded) == {"bad": PluginStatus.FAILED, "Ada.good": PluginStatus.OK}
    assert error in (loaded.records[0].error or "")
    assert loaded.records[0].path.endswith("bad.py") and "Traceback" not in (loaded.records[0].error or "")
    assert not [name for name in sys.modules if name.startswith("nekro_plugins.bad")]


def test_a_duplicate_key_is_refused_and_both_paths_named(load: Load, folder: Path) -> None:
    (folder / "a_first.py").write_text(source("same"))
    (folder / "b_second.py").write_text(source("same"))
    loaded = load()
    assert [record.status for record in loaded.records] == [PluginStatus.OK, PluginStatus.FAILED]
    assert "a_first.py has it" in (loaded.records[1].error or "")
    assert "b_second.py is refused" in (loaded.records[1].error or "")
    assert len(loaded.plugins) == 1


def test_files_of_the_same_name_in_two_folders_are_two_plugins(load: Load, folder: Path) -> None:
    for author in ("Ada", "Bob"):
        (folder / author).mkdir()
        (folder / author / "tool.py").write_text(source("tool", author))
    assert set(statuses(load(folder / "Ada", folder / "Bob"))) == {"Ada.tool", "Bob.tool"}


def test_a_disabled_plugin_loads_and_is_listed(load: Load, folder: Path) -> None:
    (folder / "one.py").write_text(source("one"))
    loaded = load(disabled=["Ada.one", "Ada.none"])
    assert statuses(loaded) == {"Ada.one": PluginStatus.DISABLED}


def test_a_missing_folder_is_reported(load: Load, tmp_path: Path) -> None:
    (record,) = load(tmp_path / "nowhere").records
    assert record.status is PluginStatus.FAILED and "does not exist (NEKRO_PLUGINS__DIRS)" in (
        record.error or ""
    )


def test_a_failed_init_is_listed(load: Load, folder: Path) -> None:
    (folder / "one.py").write_text(source("one"))
    loaded = load()
    loaded.add_error("Ada.one", "init: ValueError: no")
    assert loaded.records[0].status is PluginStatus.FAILED
    assert loaded.records[0].error == "init: ValueError: no"
    assert len(loaded.plugins) == 1


def test_installed_distributions_offer_plugins(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = folder.parent / "site"
    (site / "offered-1.0.dist-info").mkdir(parents=True)
    (site / "offered_plugin.py").write_text(source("offered"))
    (site / "offered-1.0.dist-info" / "METADATA").write_text("Name: offered\nVersion: 1.0\n")
    (site / "offered-1.0.dist-info" / "entry_points.txt").write_text(
        "[nekro_agent.plugins]\nmodule = offered_plugin\nbroken = offered_nothing\n"
        "object = offered_plugin:plugin\n"
    )
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    loaded = load(entry_points=True)
    by_error = [(record.key, record.status, record.error) for record in loaded.records]
    assert ("Ada.offered", PluginStatus.OK, None) in by_error
    assert any(key == "broken" and "No module named 'offered_nothing'" in str(e) for key, _, e in by_error)
    assert sum("is taken" in str(error) for _, _, error in by_error) == 1


def test_the_key_of_the_built_in_methods_is_refused(load: Load, folder: Path) -> None:
    (folder / "catalogue.py").write_text(source("catalogue").replace("Ada", "nekro"))
    (record,) = load().records
    assert (record.key, record.status, record.plugin) == ("nekro.catalogue", PluginStatus.FAILED, None)
    assert record.error is not None and "is that of the built-in methods; give " in record.error


def test_the_data_directory_at_import_is_the_given_one(
    load: Load, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEKRO_DATA_DIR", raising=False)
    extra = "\n(plugin.get_plugin_data_dir() / 'made').touch()\n"
    (folder / "one.py").write_text(source("one", extra=extra))
    assert statuses(load()) == {"Ada.one": PluginStatus.OK}
    assert (tmp_path / "data/plugins/Ada.one/made").is_file()


def test_placeholders_are_recorded_for_each_plugin_that_uses_them(load: Load, folder: Path) -> None:
    use = "\nfrom nekro_agent.services.brand_new import Thing\n"
    guarded = "\ntry:\n    " + use.strip() + "\nexcept ImportError:\n    Thing = 'own'\n"
    later = "\nasync def later():\n    from nekro_agent.x import y\n"
    (folder / "one.py").write_text(source("one", extra=use))
    (folder / "two.py").write_text(source("two", extra=use))
    (folder / "three.py").write_text(source("three", extra=guarded))
    (folder / "four.py").write_text(source("four", extra=later))
    loaded = load()
    assert statuses(loaded) == {
        "Ada.one": PluginStatus.DEGRADED,
        "Ada.two": PluginStatus.DEGRADED,
        "Ada.three": PluginStatus.OK,
        "Ada.four": PluginStatus.OK,
    }
    assert [record.placeholders for record in loaded.records if record.placeholders] == [
        ["nekro_agent.services.brand_new.Thing"]
    ] * 2


def test_the_sdks_own_modules_never_get_placeholders(load: Load) -> None:
    load()
    with pytest.raises(ImportError):
        exec("from nekro_agent.api.core import no_such_name", {"__name__": "nekro_agent.something"})
    with pytest.raises(ModuleNotFoundError):
        exec("import nekro_agent.no_such_module", {"__name__": "workers.something"})
    from nekro_agent.api import core

    assert not hasattr(core, "no_such_name")


def test_a_guarded_import_that_leaves_no_plugin_is_named(load: Load, folder: Path) -> None:
    (folder / "absent.py").write_text(
        "try:\n    import no_such_package\nexcept ImportError:\n    plugin = None\nelse:\n"
        + "    plugin = 1\n"
    )
    (folder / "name.py").write_text(
        "try:\n    from json import no_such_name\n    plugin = 1\nexcept Exception:\n    plugin = None\n"
    )
    (folder / "inner").mkdir()
    (folder / "inner" / "__init__.py").write_text(
        "try:\n    from .real import plugin\nexcept ImportError:\n    plugin = None\n"
    )
    (folder / "inner" / "real.py").write_text("import os\nfrom PIL.no_such_module import x\n")
    (folder / "other.py").write_text("plugin = None")
    absent, inner, name, other = (str(record.error) for record in load().records)
    assert absent.startswith(
        "PluginLoadError: absent.py sets `plugin` to None after an import that it guards failed: "
        "absent.py, line 2: No module named 'no_such_package' — install it for the workers: "
    )
    assert re.search(rf"{INSTALL} no_such_package;", absent)
    assert "real.py, line 2: No module named 'PIL" in inner
    assert "name.py, line 2: cannot import name 'no_such_name' from 'json'" in name
    assert other == (
        "PluginLoadError: other.py has no module-level name `plugin`; it must be the NekroPlugin instance"
    )


NOISY = """
import logging, os, subprocess, sys
print("printed")
sys.stdout.write("written")
os.write(1, b"raw")
sys.__stdout__.write("original")
subprocess.run(["echo", "inherited"], check=True)
handler = logging.StreamHandler(sys.stdout)
logging.getLogger("noisy").addHandler(handler)
logging.getLogger("noisy").error("logged")
"""


@pytest.mark.extended
@pytest.mark.parametrize("is_broken", [False, True])
def test_what_plugins_print_during_their_import_goes_to_stderr(tmp_path: Path, is_broken: bool) -> None:
    (tmp_path / "noisy.py").write_text(source("noisy", extra=NOISY + ("1 / 0" if is_broken else "")))
    code = (
        "import sys\nfrom pathlib import Path\nfrom nekro.plugins.loader import load_plugins\n"
        "sys.stdout.write('before ')\n"
        f"load_plugins([Path({str(tmp_path)!r})], shipped=False, entry_points=False)\n"
        "import logging\nlogging.getLogger('noisy').error('later')\n"
        "print('data')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
    )
    assert done.stdout == "before data\n"
    for text in ("printed", "written", "raw", "original", "inherited", "logged", "later"):
        assert text in done.stderr, text


@pytest.mark.extended
def test_json_of_commands_is_not_mixed_with_what_plugins_print(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(source("noisy", extra=NOISY))
    command = [sys.executable, "-m", "nekro.cli.main", "plugins", "--json"]
    environment = {"NEKRO_PLUGINS__DIRS": str(tmp_path), "NEKRO_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
        timeout=WAIT_SECONDS,
    )
    assert isinstance(json.loads(done.stdout), list)
    assert not (tmp_path / "data" / "nekro.db").exists()


def test_missing_names_of_exceptions_can_be_caught_and_raised(load: Load, folder: Path) -> None:
    (folder / "catches.py").write_text(
        "from nonebot.adapters.onebot.v11.exception import ActionFailed, NetworkError\n"
        "from nonebot.exception import FinishedException\n"
        "import nonebot\nfrom nonebot.adapters import Bot\nfrom nekro_agent.services.sandbox import runner\n"
        + source("catches")
        + "\ndef send(error):\n"
        "    try:\n        raise error\n"
        "    except (ActionFailed, NetworkError) as exc:\n        return f'caught {exc}'\n"
        "    except nonebot.exception.ActionFailed:\n        return 'never'\n"
        "    except runner.RunFinished:\n        return 'never'\n"
        "    except ValueError:\n        return 'value'\n"
        "    except FinishedException:\n        return 'finished'\n"
    )
    loaded = load()
    module = sys.modules[loaded.found[0].module]
    assert module.send(module.ActionFailed("no")) == "caught no"
    assert module.send(ValueError()) == "value"
    assert module.send(module.FinishedException) == "finished"
    assert not isinstance(3, module.Bot)
    # By an exception that nothing raises a plugin loses nothing.
    assert loaded.records[0].placeholders == ["nekro_agent.services.sandbox.runner", "nonebot.adapters.Bot"]


def test_handlers_that_nothing_calls_are_listed(load: Load, folder: Path) -> None:
    (folder / "handles.py").write_text(
        "from nonebot import on_command, on_notice\n"
        + source("handles")
        + "\nnotices = on_notice(priority=5)\n"
        "@notices.handle()\nasync def welcome(bot, event): pass\n"
        "@on_command('diary', rule=notices).handle()\nasync def _(matcher): pass\n"
    )
    (record,) = load().records
    assert record.status is PluginStatus.DEGRADED
    assert record.placeholders == [
        "nonebot.on_command('diary').handle(…) has no effect on _ (line 14)",
        "nonebot.on_notice",
        "nonebot.on_notice(…).handle(…) has no effect on welcome (line 12)",
    ]


@pytest.mark.extended
def test_packages_of_the_extra_are_here_and_their_absence_names_the_extra(load: Load, folder: Path) -> None:
    modules = (
        "aiodocker aiohttp aiosmtplib json5 lunar_python magic python_multipart numpy openpyxl "
        "PIL.Image psutil psycopg2 qdrant_client requests toml tzlocal "
        "websockets"
    )
    (folder / "all.py").write_text(source("all") + "".join(f"import {name}\n" for name in modules.split()))
    (folder / "lacks.py").write_text(
        "def missing():\n    raise ModuleNotFoundError(\"No module named 'openpyxl'\", name='openpyxl')\n"
        "missing()\nplugin = 1\n"
    )
    everything, lacks = load().records
    assert everything.error is None
    assert re.search(rf"{INSTALL} 'nekro-workers\[plugins\]'; or let", str(lacks.error))
    assert "dynamic_import_pkg('openpyxl')" in str(lacks.error)


def test_the_import_of_a_plugin_sees_the_configuration(load: Load, folder: Path) -> None:
    (folder / "one.py").write_text(
        source(
            "one",
            extra="""
from nekro_agent.api.core import config, get_qdrant_config
ADDRESS = (get_qdrant_config().url, config.AI_CHAT_CONTEXT_MAX_LENGTH, list(config.MODEL_GROUPS))
""",
        )
    )
    group = ModelConfigGroup(GROUP_NAME="draw", CHAT_MODEL="m", BASE_URL="http://m", API_KEY="k")
    core = CoreConfig(QDRANT_URL="http://q:6333", AI_CHAT_CONTEXT_MAX_LENGTH=7, MODEL_GROUPS={"draw": group})
    loaded = load(core=core)
    assert statuses(loaded) == {"Ada.one": PluginStatus.OK}
    assert sys.modules[loaded.records[0].module].ADDRESS == ("http://q:6333", 7, ["draw"])


@pytest.mark.parametrize(
    "use",
    [
        "from nekro_agent.api.core import get_qdrant_config",
        "from nekro_agent.api import core\ndef connect():\n    return core.get_qdrant_config().url",
        "def connect():\n    from nekro_agent.core.vector_db import get_qdrant_config as where",
        "from nekro_agent.core import config\ndef connect():\n    return config.QDRANT_URL",
    ],
)
def test_a_plugin_that_connects_to_a_qdrant_server_itself_is_degraded_without_one(
    load: Load, folder: Path, use: str
) -> None:
    (folder / "one.py").write_text(source("one", extra=f"\n{use}\n"))
    (folder / "other.py").write_text(source("other"))
    loaded = load()
    assert statuses(loaded) == {"Ada.one": PluginStatus.DEGRADED, "Ada.other": PluginStatus.OK}
    (missing,) = loaded.records[0].placeholders
    assert missing.endswith("(no Qdrant server: set NEKRO_QDRANT__URL)")
    assert statuses(load(core=CoreConfig(QDRANT_URL="http://q:6333"))) == dict.fromkeys(
        ("Ada.one", "Ada.other"), PluginStatus.OK
    )


@pytest.mark.parametrize(
    "text",
    [
        "for plugin in ('a', 'b'):\n    plugin = plugin.upper()",
        "print([plugin for plugin in 'ab'], {plugin: 1 for plugin in 'ab'}, lambda plugin: plugin)",
        "def load(name):\n    plugin = name\n    return plugin",
        "class Found:\n    plugin = None",
        "for number, plugin in enumerate('ab'): pass\nelse:\n    done = True",
        "async def main():\n    async for plugin in x():\n        plugin = 1",
        "if __name__ == '__main__':\n    plugin = 'script'",
        "plugin: str\nwith open(__file__) as plugin: pass",
        "def plugin(): pass",
        "from math import *",
        "try:\n    pass\nexcept OSError as plugin:\n    pass",
    ],
)
def test_scripts_in_which_plugin_is_another_variable_are_left_alone(
    load: Load, folder: Path, text: str
) -> None:
    (folder / "script.py").write_text(f"{text}\nraise RuntimeError('imported')\n")
    assert load().records == []


@pytest.mark.parametrize(
    "text",
    [
        "plugin = make()",
        "plugin: object = make()",
        "(plugin := make())",
        "other = plugin = make()",
        "other, plugin = None, make()",
        "try:\n    import no_json\nexcept ImportError:\n    import json\n    plugin = make()",
        "if True:\n    plugin = make()",
        "while True:\n    plugin = make()\n    break",
        "for name in ['x']:\n    plugin = make()",
        "with open(__file__):\n    plugin = make()",
        "def bind():\n    global plugin\n    plugin = make()\nbind()",
        "if __name__ == '__main__':\n    pass\nelse:\n    plugin = make()",
        "from script_parts import made as plugin",
        "from script_parts import *",
        "from .script_parts import *",
    ],
)
def test_each_way_to_bind_a_plugin_is_found(load: Load, folder: Path, text: str) -> None:
    made = "NekroPlugin('n', 'script', '', '1', 'Ada', '')"
    head = f"from nekro_agent.api.plugin import NekroPlugin\ndef make():\n    return {made}\n"
    (folder / "script.py").write_text(f"{head}{text}\n")
    if "script_parts" in text:
        (folder / "_unused.py").touch()
        parts = folder / "script_parts"
        parts.mkdir()
        (parts / "__init__.py").write_text(f"{head}made = make()\n")
        if "*" in text:
            (parts / "__init__.py").write_text(f"{head}globals()['plugin'] = make()\n")
    assert statuses(load(folder / "script.py")) == {"Ada.script": PluginStatus.OK}


@pytest.mark.parametrize(
    ("module", "distribution"),
    [
        ("mem0", "mem0ai"),
        ("cv2", "opencv-python-headless"),
        ("PIL.Image", "Pillow"),
        ("bs4", "beautifulsoup4"),
        ("sklearn.svm", "scikit-learn"),
        ("Crypto.Cipher", "pycryptodome"),
        ("dotenv", "python-dotenv"),
        ("google.generativeai", "google-generativeai"),
        ("google.nothing", "google"),
        ("no_such_package.part", "no_such_package"),
    ],
)
def test_the_hint_names_the_distribution_of_a_module(module: str, distribution: str) -> None:
    from nekro.plugins.importing import _how_to_install

    assert f"install {distribution};" in _how_to_install(module).replace("'", "")


def test_a_plugin_that_guards_a_failed_import_is_degraded_by_what_it_does_without(
    load: Load, folder: Path
) -> None:
    (folder / "partly.py").write_text(
        "try:\n    import no_such_package.part\nexcept ImportError:\n    no_such_package = None\n"
        "try:\n    from nekro_agent.core import no_such_name\nexcept Exception:\n    pass\n"
        "try:\n    from mem0 import Memory\nexcept (ValueError, ImportError):\n    Memory = None\n"
        "try:\n    import no_fast_json as json\nexcept ImportError:\n    import json\n"
        "try:\n    import no_slow_json\nexcept ImportError:\n    no_slow_json = __import__('json')\n"
        "try:\n    import no_class\nexcept ImportError:\n    class no_class: pass\n"
        "try:\n    import no_such_package as again\nexcept ImportError:\n    HAS_IT = False\n"
        + source("partly")
    )
    (record,) = load().records
    assert record.status is PluginStatus.DEGRADED and record.error is None
    assert record.placeholders == [
        "without mem0 (partly.py, line 10: No module named 'mem0'; install mem0ai)",
        "without nekro_agent.core.no_such_name "
        "(partly.py, line 6: cannot import name 'no_such_name' from 'nekro_agent.core')",
        "without no_such_package (partly.py, line 26: No module named 'no_such_package'; "
        "install no_such_package)",
    ]


def test_a_plugin_is_degraded_by_a_package_that_it_may_not_install(load: Load, folder: Path) -> None:
    (folder / "installs.py").write_text(
        "from nekro_agent.api.plugin import dynamic_import_pkg\n"
        "def get():\n    return dynamic_import_pkg('no-such-package>=1', import_name=WANTED)\n"
        "WANTED = None\n"
        "try:\n    get()\nexcept Exception:\n    pass\n" + source("installs")
    )
    (record,) = load(packages=PackagePolicy(allow=())).records
    assert record.status is PluginStatus.DEGRADED
    (lost,) = record.placeholders
    assert lost.startswith(
        "without no-such-package (PackageInstallError: no-such-package>=1 is not installed"
    )
