"""The import rules: order of packages and their parts, no cycles, size of folders."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from nekro_agent.placeholders import OWN_PACKAGES

ROOT = Path(__file__).parent.parent
#: From the bottom, by their folders; a package may import itself and the packages before it.
ORDER = (
    "nekro_client",
    "nekro_agent",
    "nekro/base",
    "nekro/wire",
    "broker_config",
    "nekro/broker",
    "storage",
    "nekro/sandbox",
    "nekro/agent",
    "nekro/plugins",
    "nekro/app",
    "nekro/operations",
    "workers",
    "nekro_agent/testing",
    "nekro/gateway",
    "nekro/cli",
    "nekro/extensions",
)
#: Packages that may import only the modules and packages named here, not all of those before them.
ONLY = {
    "nekro_client": set(),
    "storage": {
        "broker_config.settings",
        "broker_config.urls",
        "nekro.base.metrics",
        "nekro.base.tasks",
        "nekro_agent",
        "nekro_client.event_types",
    },
    "plugin_pkgs": {"nekro_agent"},
}
#: Libraries, or packages of one, that a package must not import.
FORBIDDEN_LIBRARIES = {
    "nekro_client": {"celery", "kombu", "redis", "sqlalchemy", "psycopg", "alembic", "fastapi", "loguru"},
    "nekro_agent": {"celery", "kombu", "redis", "sqlalchemy", "psycopg", "alembic"},
    "nekro/wire": {"celery", "kombu", "redis", "sqlalchemy", "psycopg", "alembic"},
    # Declaring classes for the tables takes each process 0.2 s of CPU when it imports them.
    "storage": {"celery", "kombu", "redis", "sqlalchemy.orm"},
    "nekro/agent": {"celery", "kombu", "redis", "sqlalchemy"},
    # Commands use it, too.
    "nekro/operations": {"fastapi", "starlette", "httpx"},
    "plugin_pkgs": {"celery", "kombu", "redis", "sqlalchemy"},
}
PACKAGES = (*ORDER, "plugin_pkgs")
#: What each part (subpackage) of a package may import of the other parts; "*" stands for the modules
#: directly in the package's folder, which may import every part.
PARTS = {
    "nekro_client": {"models": ("*",)},
    "nekro/broker": {
        "tracing": (),
        "redis": (),
        "delivery": ("redis", "tracing"),
        "celery": ("redis", "delivery"),
    },
    "storage": {
        "driver": (),
        "repositories": ("*", "driver"),
        "accounts": ("*", "driver", "repositories"),
        "listings": ("*", "driver", "repositories"),
        "files": ("*", "driver", "repositories"),
        "migrations": ("*",),
    },
    "nekro/sandbox": {
        "guest": (),
        "filter": (),
        "limits": ("*",),
        "packages": ("*",),
        "drivers": ("*", "filter", "guest", "limits"),
    },
    "nekro/agent": {
        "answers": ("*", "llm"),
        "llm": ("*",),
        "pictures": ("*",),
    },
    "nekro/app": {
        "areas": ("*",),
        "chats": ("*", "areas"),
        "calls": ("*", "chats"),
        "approvals": ("*", "calls", "chats"),
        "rounds": ("*", "approvals", "calls", "chats"),
    },
    "nekro/extensions": {
        "mcp": (),
        "openai": (),
        "plugin_pages": (),
        "sse_adapter": (),
        "webhooks": (),
    },
    "workers": {
        "plugins": (),
        "calls": ("plugins",),
        "pools": (),
        "jobs": ("calls", "pools"),
        "ops": ("calls", "jobs"),
        "rounds": ("calls",),
    },
    "nekro/gateway": {
        "web": ("*",),
        "access": ("*",),
        "streams": ("*", "web"),
        "api": ("*", "web", "access", "streams"),
        "console": ("*", "web", "access"),
        "document": ("*", "web", "console"),
    },
    "nekro/cli": {
        "services": ("*",),
        "views": ("*",),
        "doctor": ("*", "services", "views"),
        "commands": ("*", "doctor", "services", "views"),
    },
    "nekro_agent": {
        "tools": ("*", "downloads", "files", "schemas"),
        "adapters": ("*", "api", "tools"),
        "core": ("*", "files", "tools"),
        "downloads": ("*", "files", "tools"),
        "files": ("*", "core", "downloads", "tools"),
        "models": ("*", "core", "schemas"),
        # `AgentCtx.db_user` is synchronous and reads a row, so it waits as `execution.greenlets` allows.
        "schemas": ("*", "api", "core", "execution", "files", "models", "tools"),
        "execution": ("schemas",),
        "packages": ("*", "core", "execution", "files"),
        "commands": ("*", "schemas"),
        "api": ("*", "commands", "core", "execution", "files", "models", "packages", "schemas"),
        "services": ("*", "api", "commands", "core", "execution", "files", "models", "schemas"),
    },
}
#: Modules that import packages above theirs, and what they import there.
AGAINST_ORDER: dict[str, set[str]] = {}
#: Packages whose parts import each other, with what keeps them so.
CYCLIC_PARTS = {
    "nekro_agent": "plugins import `api`, `core`, `models`, `schemas`, `services` and `tools` by these names,"
    " whose contents the SDK of Nekro Agent determines",
}
#: Largest number of modules in one folder, ``__init__`` not counted.
MAX_MODULES = 16
#: Folders that may hold more, with the reason.
LARGE_FOLDERS = {
    "nekro/cli/commands": "one module per command",
    "nekro_client": "three modules are generated from the asynchronous ones beside them",
}

#: A module with fewer lines is a topic of its own for a reason.
LEAST_LINES = 60
#: Folders whose modules may be short: plugins import them, or each is one command or revision.
SHORT_FOLDERS = (
    *(f"nekro_agent/{name}/" for name in ("adapters", "api", "core", "schemas", "services")),
    "nekro/cli/commands/",
    "storage/migrations/",
)
#: Other short modules, with the reason.
SHORT_MODULES = {
    "broker_config.redis_library": "imported before any module of redis-py",
    "nekro.base.redaction": "what hides secrets, for a reader who checks that",
    "nekro.base.release": "`nekro --help` imports it",
    "nekro.base.shared_property": "of services and of commands, which import nothing else of each other",
    "nekro.broker.celery.names": "the list of Celery's undocumented names",
    "nekro.cli.local_messages": "its imports are those of one operation of commands",
    "nekro.extensions.openai.rows": "each extension has its SQL in `rows`",
    "nekro.gateway.extensions": "the interface of extensions to the gateway",
    "nekro.wire.plain_json": "ten modules read and write JSON with it, without the other codecs",
    "nekro_agent.downloads.order": "of an attempt, which imports an HTTP client, and of its callers",
    "nekro_agent.tools.message_id": "plugins import it",
    "nekro_agent.tools.onebot_util": "plugins import it",
    "nekro_agent.tools.task_groups": "of downloads, files and the sandbox's packages alike",
    "nekro_client.event_types": "storage imports it without pydantic",
    "storage.accounts.key_rights": "processes that read no rows import it",
    "storage.files.stores.opening": "imports the kinds of stores, which import their interface",
    "storage.driver.values": "SQL texts import it without SQLAlchemy",
}


def modules_of(root: Path, packages: Sequence[str]) -> dict[str, Path]:
    """Return every module of some packages by its dotted name."""
    paths = [path for package in packages for path in (root / package).rglob("*.py")]
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }


def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a module, those in functions included."""
    return _import_statements(path.read_text("utf-8"))


@functools.cache
def _import_statements(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_by(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the known modules that a module imports anywhere, also in functions and for type checking.

    Importing a module does not count as importing the packages that contain it.
    """
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        else:
            assert node.level == 0, f"{path}:{node.lineno}: import it by its absolute name"
            for alias in node.names:
                candidates = (f"{node.module}.{alias.name}", str(node.module))
                yield from [name for name in candidates if name in known][:1]


def graph_of(root: Path, packages: Sequence[str]) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    known = modules_of(root, packages)
    return {module: set(imported_by(path, known)) - {module} for module, path in known.items()}


@functools.cache
def product_graph() -> dict[str, set[str]]:
    return graph_of(ROOT, PACKAGES)


def cycle_in(graph: dict[str, set[str]]) -> str | None:
    """Return a cycle as ``a -> b -> a``, in which each module imports the next; None if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return " -> ".join(reversed(exc.args[1]))
    return None


def dotted(folder: str) -> str:
    """Return the module name of a package's folder."""
    return folder.replace("/", ".")


@functools.cache
def package_of(module: str) -> str | None:
    """Return the package that contains a module; None for a module that is not of the product."""
    found = [p for p in PACKAGES if module == dotted(p) or module.startswith(f"{dotted(p)}.")]
    return max(found, key=len, default=None)


def part_of(package: str, module: str) -> str | None:
    """Return the part of a package that contains a module, "*" for none; None for other packages' modules."""
    if package_of(module) != package:
        return None
    name = module.removeprefix(dotted(package)).removeprefix(".").partition(".")[0]
    return name if name and (ROOT / package / name).is_dir() else "*"


@functools.cache
def imports_of(package: str) -> list[tuple[Path, str]]:
    found = []
    for module, path in sorted(modules_of(ROOT, [package]).items()):
        if package_of(module) != package:
            continue
        for node in import_statements(path):
            if isinstance(node, ast.Import):
                found += [(path, alias.name) for alias in node.names]
            elif node.module and node.level == 0:
                found.append((path, node.module))
    return found


def is_allowed(package: str, module: str) -> bool:
    imported = package_of(module)
    if imported == package or imported is None:
        return True
    if package in ONLY:
        return any(module == name or module.startswith(f"{name}.") for name in ONLY[package])
    return imported in ORDER[: ORDER.index(package)]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    against: dict[str, set[str]] = {}
    for path, module in imports_of(package):
        if not is_allowed(package, module):
            against.setdefault(path.relative_to(ROOT).as_posix(), set()).add(module)
    known = {path: names for path, names in AGAINST_ORDER.items() if path.startswith(f"{package}/")}
    assert against == known


def test_the_core_imports_no_extension() -> None:
    """Each can be left out, so processes find them by their names (``nekro.app.extensions``)."""
    against: dict[str, set[str]] = {}
    for module, imported in product_graph().items():
        found = {name for name in imported if package_of(name) == "nekro/extensions"}
        if found and package_of(module) != "nekro/extensions":
            against[module] = found
    assert against == {}


@pytest.mark.parametrize("package", FORBIDDEN_LIBRARIES)
def test_a_package_imports_none_of_its_forbidden_libraries(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {module}"
        for path, module in imports_of(package)
        if any(f"{module}.".startswith(f"{library}.") for library in FORBIDDEN_LIBRARIES[package])
    ]
    assert wrong == []


def test_code_that_runs_in_the_sandbox_imports_only_the_standard_library() -> None:
    guest = ROOT / "nekro" / "sandbox" / "guest"
    inside = {module for path, module in imports_of("nekro/sandbox") if path.is_relative_to(guest)}
    # The writer of tagged text is bundled with the code that runs in the sandbox.
    inside |= {module for path, module in imports_of("nekro/wire") if path.name == "tagged.py"}
    ours = {"nekro.wire.tagged"} | {module for module in inside if module.startswith("nekro.sandbox.guest.")}
    names = {module.partition(".")[0] for module in inside - ours}
    assert names <= set(sys.stdlib_module_names)


def test_a_gateway_loads_nothing_that_runs_code() -> None:
    """Rounds workers and commands run code; a gateway sends it to them, and knows the types of reports."""
    modules = [module for module in product_graph() if package_of(module) == "nekro/gateway"]
    source = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*(name for name in sys.modules if name.startswith('nekro.sandbox')))"
    )
    sends = ["nekro.app.calls.run_calls", "nekro.app.rounds.runs"]
    done = subprocess.run(
        [sys.executable, "-c", source, *modules, *sends], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.split()) == ["nekro.sandbox", "nekro.sandbox.models"]


def test_the_sdk_s_test_world_loads_no_library_of_the_broker() -> None:
    """Each run of a plugin's tests imports it; Celery, kombu and redis-py would be a third of its time."""
    code = (
        "import sys, nekro_agent.testing\n"
        "print(*({'celery', 'kombu', 'redis', 'psycopg', 'fastapi', 'opentelemetry'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_redis_is_imported_without_opentelemetry() -> None:
    """``broker_config.redis_library`` hides it; its SDK would be a tenth of the time of a short command."""
    direct = [
        f"{path.relative_to(ROOT)}: {module}"
        for package in ORDER
        if package != "broker_config"
        for path, module in imports_of(package)
        if f"{module}.".startswith("redis.")
    ]
    assert direct == [], "write `from broker_config.redis_library import redis`"


def test_no_modules_import_each_other_in_a_cycle() -> None:
    cycle = cycle_in(product_graph())
    assert cycle is None, f"import cycle: {cycle}"


@pytest.mark.parametrize(
    "back", ["from p.a import f", "import p.a", "from p import a", "from p.sub import a_again"]
)
@pytest.mark.parametrize("form", ["{}", "if TYPE_CHECKING:\n    {}", "def g():\n    {}"])
def test_a_cycle_of_imports_is_found_in_each_form(tmp_path: Path, back: str, form: str) -> None:
    package = tmp_path / "p"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "a.py").write_text("from p import b")
    (package / "sub" / "__init__.py").write_text("from p.a import f as a_again")
    (package / "b.py").write_text("import ast")
    assert cycle_in(graph_of(tmp_path, ["p"])) is None
    (package / "b.py").write_text(form.format(back))
    cycle = cycle_in(graph_of(tmp_path, ["p"]))
    assert cycle is not None and {"p.a", "p.b"} <= set(cycle.split(" -> "))


@pytest.mark.parametrize("package", PARTS)
def test_a_part_of_a_package_imports_only_the_parts_that_it_may(package: str) -> None:
    wrong = []
    for module, imported in product_graph().items():
        part = part_of(package, module)
        if part is None or part == "*":
            continue
        allowed = (None, part, *PARTS[package][part])
        wrong += [f"{module}: {name}" for name in imported if part_of(package, name) not in allowed]
    assert wrong == []


def test_the_parts_of_a_package_do_not_import_each_other() -> None:
    of_parts = {
        package: {part: set(allowed) - {"*"} for part, allowed in parts.items()}
        for package, parts in PARTS.items()
    }
    assert {package for package, graph in of_parts.items() if cycle_in(graph)} == set(CYCLIC_PARTS)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_with_parts_has_rules_for_them(package: str) -> None:
    parts = {part_of(package, module) for module in product_graph()} - {None, "*"}
    assert not parts or package in PARTS


@pytest.mark.parametrize("package", PARTS)
def test_every_part_of_a_package_has_rules(package: str) -> None:
    assert {part_of(package, module) for module in product_graph()} - {None, "*"} == set(PARTS[package])


def test_a_folder_holds_at_most_the_modules_of_its_limit() -> None:
    modules = modules_of(ROOT, PACKAGES).values()
    counts = Counter(
        path.parent.relative_to(ROOT).as_posix() for path in modules if path.name != "__init__.py"
    )
    assert {folder for folder, count in counts.items() if count > MAX_MODULES} == set(LARGE_FOLDERS)


def test_a_short_module_has_a_reason() -> None:
    short = {
        name
        for name, path in modules_of(ROOT, PACKAGES).items()
        if path.name != "__init__.py"
        and not path.relative_to(ROOT).as_posix().startswith(SHORT_FOLDERS)
        and len(path.read_text("utf-8").split("\n")) <= LEAST_LINES
    }
    assert short <= set(SHORT_MODULES)


def test_the_wheel_ships_every_package_and_no_other() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(shipped) == sorted({package.partition("/")[0] for package in PACKAGES})


def test_placeholders_know_every_package_that_is_no_plugin() -> None:
    """Placeholders are for plugins: an import of our own that lacks a name is an error at once."""
    assert sorted(OWN_PACKAGES) == sorted({package.partition("/")[0] for package in ORDER})
