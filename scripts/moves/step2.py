"""Step 2: what gateway and command line need too leaves workers/: nekro/plugins and nekro/app."""

import ast
import re

import layers
from engine import Step

#: From workers/, by module; folders with everything in them.
PLUGINS = {
    "plugins/discovery.py": "discovery.py",
    "plugins/importing.py": "importing.py",
    "plugins/loader.py": "loader.py",
    "plugins/source_watch.py": "source_watch.py",
    "plugins/configuration.py": "configuration.py",
    "plugins/policies.py": "policies.py",
    "plugins/description.py": "description.py",
    "plugins/registry.py": "registry.py",
    "plugins/lanes.py": "lanes.py",
    "import_trials.py": "import_trials.py",
    # The descriptions themselves, which those modules make.
    "catalogue/entries.py": "entries.py",
    "catalogue/registry.py": "entry_registry.py",
}
APP = {
    "approvals": "approvals",
    "budgets": "budgets",
    "chats": "chats",
    "leases": "leases",
    "catalogue": "catalogue",
    "calls/detached.py": "calls/detached.py",
    "calls/dispatch.py": "calls/dispatch.py",
    "calls/fleet_hooks.py": "calls/fleet_hooks.py",
    "calls/patience.py": "calls/patience.py",
    "calls/plugin_tasks.py": "calls/plugin_tasks.py",
    "calls/results.py": "calls/results.py",
    "calls/story.py": "calls/story.py",
    "jobs/cancel.py": "jobs/cancel.py",
    "jobs/data.py": "jobs/data.py",
    "jobs/signals.py": "jobs/signals.py",
    "jobs/retry.py": "jobs/retry.py",
    "jobs/attempts.py": "jobs/attempts.py",
    "listing/answers.py": "listing/answers.py",
    "listing/chat_plugins.py": "listing/chat_plugins.py",
    "listing/rest.py": "listing/rest.py",
    "listing/sleep.py": "listing/sleep.py",
    "listing/__init__.py": "listing/__init__.py",
    "rounds/context/chat_history.py": "rounds/chat_history.py",
    "rounds/events.py": "rounds/events.py",
    "rounds/intake.py": "rounds/intake.py",
    "rounds/interruption.py": "rounds/interruption.py",
    "rounds/ledger.py": "rounds/ledger.py",
    "rounds/runs.py": "rounds/runs.py",
    "rounds/stop.py": "rounds/stop.py",
    "rounds/turn_ends.py": "rounds/turn_ends.py",
    "rounds/turn_spans.py": "rounds/turn_spans.py",
    "ops/clock_watch.py": "ops/clock_watch.py",
    "ops/fleet.py": "ops/fleet.py",
    "ops/host_header.py": "ops/host_header.py",
    "ops/http_server.py": "ops/http_server.py",
    "ops/logs.py": "ops/logs.py",
    "ops/sockets.py": "ops/sockets.py",
    "pools/background.py": "background.py",
    "pools/polls.py": "polls.py",
    "composition.py": "composition.py",
    "parts.py": "parts.py",
}
#: Moved if they exist: they came while this script was written.
OPTIONAL = {"jobs/retry.py", "jobs/attempts.py"}
#: Left alone in its folder; it serves the calls of built-in methods.
WORKERS = {"listing/targets.py": "calls/built_in_targets.py"}
PACKAGES = {
    "nekro/plugins": "Plugins of this system: finding, importing, describing and configuring them.",
    "nekro/app": "What worker, gateway and command line need alike: calls, chats, approvals, budgets, the catalogue.",
    "nekro/app/calls": "Calls of plugin methods, as their callers see them: dispatch, detaching, results.",
    "nekro/app/jobs": "Background jobs, as callers see them: their data, their cancellation.",
    "nekro/app/ops": "Operation of any process: probes, metrics, logs, the clock.",
    "nekro/app/rounds": "Rounds as rows and events: requested, recorded, stopped; runs of code without a model.",
}
MESSAGE = """Move what gateway and commands need from workers to nekro.app

`workers` holds what a Celery worker process runs: process, pools, tasks,
the handler of calls, the drain of rounds, jobs, sweeps. What gateway and
command line need as well becomes `nekro.app`: dispatching calls, chats,
approvals, budgets, the catalogue, rounds as rows, leases. Finding,
importing, describing and configuring plugins becomes `nekro.plugins`.

Pure moves by script, as in the commit before. Modules that still import
against the order are listed in `AGAINST_ORDER` of tests/test_layers.py.
"""
KEEP_STRINGS = {"tests/sdk/test_sdk_import_contexts.py"}


def run(step: Step) -> None:
    for old, new in APP.items():
        if old in OPTIONAL and f"workers/{old}" not in step.files:
            step.notes.append(f"nothing to move: workers/{old}")
            continue
        step.move(f"workers/{old}", f"nekro/app/{new}")
    for old, new in PLUGINS.items():
        step.move(f"workers/{old}", f"nekro/plugins/{new}")
    for old, new in WORKERS.items():
        step.move(f"workers/{old}", f"workers/{new}")
    step.carry_out()
    for path, words in PACKAGES.items():
        step.create(f"{path}/__init__.py", f'"""{words}"""\n')
    docstrings(step)
    tests(step)
    docs(step)
    step.rewrite(KEEP_STRINGS)
    step.files = step.files  # of before the move, for the engine
    parts(step)
    step.format()


def docstrings(step: Step) -> None:
    step.sub("workers/plugins/__init__.py", r'\A""".*?"""', '"""Plugins in a worker: initialisation, reload, states, pinned plugins, publication."""')
    step.sub("workers/calls/__init__.py", r'\A""".*?"""', '"""Calls of plugin methods in a worker: claim, execution, record."""')
    step.sub("workers/rounds/__init__.py", r'\A""".*?"""', '"""Rounds of the LLM in a worker: drained in order, with their context."""')
    step.sub("workers/ops/__init__.py", r'\A""".*?"""', '"""Operation of workers: health, printed lines, shutdown, the sweep."""')


def tests(step: Step) -> None:
    step.edit(
        layers.FILE,
        ('    "workers",\n', '    "nekro/plugins",\n    "nekro/app",\n    "workers",\n'),
        (
            "#: Packages whose parts import each other, with what keeps them so.\n",
            """#: Modules that import packages above theirs, and what they import there.
AGAINST_ORDER: dict[str, set[str]] = {}
#: Packages whose parts import each other, with what keeps them so.
""",
        ),
        (
            """    wrong = [f"{p.relative_to(ROOT)}: {m}" for p, m in imports_of(package) if not is_allowed(package, m)]
    assert wrong == []
""",
            """    against: dict[str, set[str]] = {}
    for path, module in imports_of(package):
        if not is_allowed(package, module):
            against.setdefault(path.relative_to(ROOT).as_posix(), set()).add(module)
    known = {path: names for path, names in AGAINST_ORDER.items() if path.startswith(f"{package}/")}
    assert against == known
""",
        ),
    )
    step.edit(
        "tests/system/test_worker_template.py",
        ('        "nekro.broker",\n', '        "nekro.app",\n        "nekro.broker",\n'),
        ('        "nekro.wire",\n', '        "nekro.plugins",\n        "nekro.wire",\n'),
    )


def docs(step: Step) -> None:
    import step1

    step.sub(
        "CONTRIBUTING.md",
        r"`nekro_client` ← `nekro_agent` ← .*? ← `nekro/cli`;",
        " ← ".join(f"`{name}`" for name in step1.order(step)) + ";",
    )
    step.edit("CONTRIBUTING.md", ("who reads it: `workers/catalogue/`", "who reads it: `nekro/app/catalogue/`"), optional=True)
    step.edit(
        "docs/architecture.md",
        ("A package imports only packages above it in this table;", "A package imports only packages above it in this table, but for the modules that `AGAINST_ORDER` in `tests/test_layers.py` lists;"),
        optional=True,
    )
    step.sub(
        "docs/architecture.md",
        r"^\| `workers/` \|[^\n]*\n",
        "| `nekro/plugins/` | finding, importing, describing and configuring plugins; their descriptions as plain data |\n"
        "| `nekro/app/` | what worker, gateway and command line need alike, and the composition root: `calls/` (dispatch),"
        " `approvals/`, `budgets/`, `catalogue/` (what workers serve), `chats/`, `rounds/` (as rows and events), `jobs/` (data),"
        " `listing/` (help, search, plugins that sleep), `leases/`, `ops/` |\n"
        "| `workers/` | what a Celery worker process runs: `calls/` (handler, claims), `rounds/` (drain, context), `jobs/`,"
        " `plugins/` (initialisation, reload, pinned plugins), `pools/`, `ops/` (health, sweeps), `web/` (HTTP routes of"
        " plugins), `mcp/` (plugins of MCP servers) |\n",
    )


# -- the tables of test_layers.py, from the imports as they are ------------------------------------------


def imports(step: Step, package: str, modules: set[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in sorted((step.root / package).rglob("*.py")):
        name = file.relative_to(step.root).as_posix()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found.setdefault(name, set()).add(full if full in modules else node.module)
            elif isinstance(node, ast.Import):
                found.setdefault(name, set()).update(alias.name for alias in node.names)
    return found


def parts(step: Step, packages: tuple[str, ...] = ("nekro/app", "workers")) -> None:
    from engine import git

    git(step.root, "add", "-A")
    files = [f for f in git(step.root, "ls-files").strip().split("\n") if f.endswith(".py")]
    modules = {f.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for f in files}
    file = step.root / layers.FILE
    text = file.read_text("utf-8")
    for package in packages:
        prefix = package.replace("/", ".")
        folders = sorted(p.name for p in (step.root / package).iterdir() if p.is_dir() and any(p.rglob("*.py")))
        graph: dict[str, set[str]] = {folder: set() for folder in folders}
        for name, names in imports(step, package, modules).items():
            part = name.removeprefix(f"{package}/").split("/")[0]
            if part not in graph:
                continue
            for module in names:
                if module == prefix or module.startswith(f"{prefix}."):
                    other = module.removeprefix(prefix).removeprefix(".").split(".")[0]
                    other = other if other in graph else "*"
                    if other != part:
                        graph[part].add(other)
        order: list[str] = []
        while rest := sorted(set(graph) - set(order)):
            ready = [p for p in rest if graph[p] - {"*"} <= set(order)]
            order.append((ready or rest)[0])  # a cycle is for the test to find
        rows = []
        for part in order:
            allowed = sorted(graph[part], key=lambda p: -1 if p == "*" else order.index(p))
            words = ", ".join(f'"{p}"' for p in allowed) + ("," if len(allowed) == 1 else "")
            rows.append(f'        "{part}": ({words}),\n')
        block = f'    "{package}": {{\n{"".join(rows)}    }},\n'
        pattern = re.compile(rf'^    "{re.escape(package)}": \{{\n        "\w+": \(.*?^    \}},\n', re.M | re.S)
        if pattern.search(text):
            text = pattern.sub(lambda _, block=block: block, text, count=1)
        else:
            text = text.replace('    "workers": {\n', f'{block}    "workers": {{\n', 1)
    # Against the order.
    table = re.search(r"ORDER = \(\n(.*?)\n\)\n", text, re.S)[1]
    order = re.findall(r'"([\w/]+)"', table)
    against: dict[str, set[str]] = {}

    def owner(module: str) -> str | None:
        found = [p for p in order if module == p.replace("/", ".") or module.startswith(p.replace("/", ".") + ".")]
        return max(found, key=len, default=None)

    own = re.findall(r'^    "([\w/]+)": (?:set\(\)|\{.*\}),$', text.split("ONLY = {")[1].split("\n}")[0], re.M)
    for package in order:
        if package in own:
            continue
        for name, names in imports_by_from(step, package).items():
            inner = max((p for p in order if name.startswith(f"{p}/")), key=len)
            if inner != package:
                continue
            wrong = {m for m in names if owner(m) and order.index(owner(m)) > order.index(package)}
            if wrong:
                against[name] = wrong
    rows = []
    for name, names in sorted(against.items()):
        rows.append(f'    "{name}": {{\n' + "".join(f'        "{m}",\n' for m in sorted(names)) + "    },\n")
        step.notes.append(f"against the order: {name} -> {len(names)} modules")
    body = "{\n" + "".join(rows) + "}" if rows else "{}"
    text = re.sub(r"^AGAINST_ORDER: dict\[str, set\[str\]\] = \{.*?\}\n(?=#: )", lambda _: f"AGAINST_ORDER: dict[str, set[str]] = {body}\n", text, count=1, flags=re.M | re.S)
    file.write_text(text, "utf-8")


def imports_by_from(step: Step, package: str) -> dict[str, set[str]]:
    """As ``imports_of`` of the test: the module after ``from``."""
    found: dict[str, set[str]] = {}
    for file in sorted((step.root / package).rglob("*.py")):
        name = file.relative_to(step.root).as_posix()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found.setdefault(name, set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.setdefault(name, set()).add(node.module)
    return found
