"""Step 1: whole packages below nekro/."""

import re

import layers
from engine import Step

MOVES = {
    "runtime": "nekro/base",
    "codec": "nekro/wire",
    "messaging": "nekro/broker",
    "sandbox": "nekro/sandbox",
    "agent": "nekro/agent",
    "connectors": "nekro/extensions",
    "gateway": "nekro/gateway",
    "cli": "nekro/cli",
    # Not `nekro.wire.wire`.
    "codec/wire.py": "nekro/wire/invocation.py",
}
MESSAGE = """Move eight packages below one package, nekro

A wheel that claims `agent`, `cli`, `codec`, `connectors`, `gateway`,
`messaging`, `runtime` and `sandbox` at the top of site-packages breaks
users who have modules of these names. The packages become `nekro.agent`,
`nekro.cli`, `nekro.wire`, `nekro.extensions`, `nekro.gateway`,
`nekro.broker`, `nekro.base` and `nekro.sandbox`.

Pure moves: a script moved the files, rewrote imports, dotted names and
paths in code, tests, settings of tools and pages, and sorted imports
again. `nekro_agent`, `nekro_client`, the command, names of tasks,
settings, rows and keys stay as they are.
"""
#: Python files whose strings name modules of plugins.
KEEP_STRINGS = {"tests/sdk/test_sdk_import_contexts.py"}


def run(step: Step) -> None:
    for old, new in MOVES.items():
        step.move(old, new)
    step.carry_out()
    step.create("nekro/__init__.py", '"""The system: everything but the plugin SDK, the client and the worker process."""\n')
    product(step)
    build_files(step)
    tests(step)
    docs(step)
    step.rewrite(KEEP_STRINGS)
    step.format()


def product(step: Step) -> None:
    step.sub(
        "nekro_agent/placeholders.py",
        r"OWN_PACKAGES: Final = \(\n.*?\n\)\n",
        'OWN_PACKAGES: Final = (_ROOT, "nekro_client", "nekro", "broker_config", "storage", "workers")\n',
    )
    step.edit(
        "nekro_agent/packages/contexts.py",
        (
            "Top-level packages of this project have common names (``agent``, ``storage``, …).",
            "Top-level packages of this project have common names (``storage``, ``workers``, …).",
        ),
    )
    step.edit(
        "nekro/sandbox/bundle.py",
        ("    directory = Path(__file__).parent.parent\n", "    directory = Path(__file__).parents[2]\n"),
        ('_PACKAGES: Final = ("sandbox.guest", "codec")', '_PACKAGES: Final = ("nekro.sandbox.guest", "nekro.wire")'),
    )
    step.edit("nekro/cli/reference.py", (".parents[1] / \"docs\"", ".parents[2] / \"docs\""))
    step.edit("nekro/cli/services/process.py", ("a folder named `cli` in", "a folder named `nekro` in"), optional=True)
    step.edit("nekro/cli/commands/bench.py", ("Path(__file__).resolve().parents[2]", "Path(__file__).resolve().parents[3]"))


def build_files(step: Step) -> None:
    moved = "|".join(name for name in MOVES if "/" not in name)
    step.sub(
        "pyproject.toml",
        r'packages = \[\n    "nekro_agent",\n.*?\n\]\n',
        'packages = [\n    "nekro_agent",\n    "nekro_client",\n    "broker_config",\n    "storage",\n'
        '    "nekro",\n    "workers",\n    "plugin_pkgs",\n]\n',
    )
    step.sub(
        "pyproject.toml",
        r'^packages = \["nekro_agent", [^\n]*\]\n',
        'packages = ["nekro_agent", "nekro_client", "broker_config", "storage", "nekro", "workers", "plugin_pkgs"]\n',
    )
    step.sub("Dockerfile", rf"^COPY cli cli\n", "COPY nekro nekro\n")
    step.sub("Dockerfile", rf"^COPY ({moved}) \1\n", "")
    step.sub(".dockerignore", r"^!nekro_agent\n", "!nekro\n!nekro_agent\n")
    step.sub(".dockerignore", rf"^!({moved})\n", "")


def tests(step: Step) -> None:
    layers.by_folder(step)
    layers.table(step, MOVES)
    step.edit(
        "tests/docs/test_docs_true.py",
        (r"re.findall(r\"^\| `(\w+)/` \|\", page, re.MULTILINE)".replace('\\"', '"'), r're.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE)'),
    )
    step.edit(
        "tests/test_lines_of_others.py",
        ('calls_of("read_text", ("sandbox",))', 'calls_of("read_text", ("nekro/sandbox",))'),
        ('(ROOT / "sandbox").rglob', '(ROOT / "nekro" / "sandbox").rglob'),
        ("everything else in ``sandbox`` is", "everything else in ``nekro/sandbox`` is"),
    )
    step.edit("tests/private_uses.py", ('ROOT / "messaging" / "celery"', 'ROOT / "nekro" / "broker" / "celery"'))
    step.sub(
        "tests/client/test_answer_limits.py",
        r'    packages = \("agent".*?"workers"\)\n',
        '    packages = ("broker_config", "nekro", "nekro_agent", "nekro_client", "plugin_pkgs", "storage", "workers")\n',
    )
    step.sub(
        "tests/security/test_security_regular_expressions.py",
        r"PACKAGES = \(\n.*?\n\)  # fmt: skip\n",
        'PACKAGES = ("broker_config", "nekro", "nekro_agent", "nekro_client", "plugin_pkgs", "storage", "workers")\n',
    )
    step.edit(
        "tests/docs/test_settings_and_constants.py",
        ('LATER_PACKAGES = {"connectors", "gateway", "nekro_client"}', 'LATER_PACKAGES = ("nekro.extensions.", "nekro.gateway.", "nekro_client.")'),
        ('return name.split(".")[0] in LATER_PACKAGES', 'return name.startswith(LATER_PACKAGES)'),
    )
    step.edit("tests/client/test_commands_over_gateway.py", ('(ROOT / "cli" / "remote")', '(ROOT / "nekro" / "cli" / "remote")'))
    step.edit("tests/compose/check_compose.py", ('ROOT / "sandbox" / "packages"', 'ROOT / "nekro" / "sandbox" / "packages"'))
    for file in ("test_console_markdown", "test_console_source", "test_console_visible"):
        step.edit(f"tests/console/{file}.py", ('.parents[2] / "gateway" / "console"', '.parents[2] / "nekro" / "gateway" / "console"'))
    step.edit("tests/gateway/test_vocabulary.py", ('.parents[2] / "gateway" / "console"', '.parents[2] / "nekro" / "gateway" / "console"'))
    step.edit("tests/docs/test_readme.py", ("site-packages/cli/main.py", "site-packages/nekro/cli/main.py"))
    step.edit(
        "tests/cli/test_cli_imports.py",
        ('"plugin_pkgs", "nekro_plugins", "agent", "workers.plugins.loader"', '"plugin_pkgs", "nekro_plugins", "nekro.agent", "workers.plugins.loader"'),
    )
    step.edit(
        "tests/system/test_worker_template.py",
        (
            '''        "broker_config",
        "celery",
        "codec",
        "connectors",
        "messaging",
        "nekro_agent",
        "storage",
        "workers",
    )
    missing = {name for name in found - set(before["imports"]) if name.partition(".")[0] in ours}
''',
            '''        "broker_config",
        "celery",
        "nekro.broker",
        "nekro.extensions",
        "nekro.wire",
        "nekro_agent",
        "storage",
        "workers",
    )
    missing = {name for name in found - set(before["imports"]) if f"{name}.".startswith(ours)}
''',
        ),
    )
    step.edit(
        "tests/security/test_security_hostile_text.py",
        ('"cli.main", "up", "--methods", "1", "--long", "0", "--rounds", "0"],\n', '"cli.main", "up", "--methods", "1", "--long", "0",\n         "--rounds", "0"],\n'),
        optional=True,
    )
    step.edit(
        "tests/sandbox/test_sandbox_shared_area.py",
        (
            """    "import sys\\nfrom pathlib import Path\\nfrom sandbox.areas.shared import Hold\\nHold(Path(sys.argv[1]))\\n"
""",
            """    "import sys\\nfrom pathlib import Path\\nfrom sandbox.areas.shared import Hold\\n"
    "Hold(Path(sys.argv[1]))\\n"
""",
        ),
        optional=True,
    )
    step.edit(
        "tests/test_lines_of_others.py",
        ("records that the service writes; RECORD of a wheel, by newline alone", "records of the service; RECORD of a wheel, by newline alone"),
        optional=True,
    )
    upgrade(step)
    contexts(step)


def upgrade(step: Step) -> None:
    """Trees of versions before the move have another main module."""
    step.edit(
        "tests/worker_fleet.py",
        (
            '''[sys.executable, "-P", "-m", "cli.main", *arguments, str(number)]''',
            '''[sys.executable, "-P", "-m", main_module(environment), *arguments, str(number)]''',
        ),
        (
            '''class Worker:
    """One `nekro worker` process''',
            '''def main_module(environment: dict[str, str]) -> str:
    """The command's module in the code that an environment runs: versions up to 0.2 have another one."""
    tree = environment.get("PYTHONPATH", "").partition(os.pathsep)[0]
    prefix = "" if Path(tree, "cli", "main.py").is_file() else "nekro."
    return f"{prefix}cli.main"


class Worker:
    """One `nekro worker` process''',
        ),
        ("with an environment as ``python -m cli.main``", "with an environment as ``python -m nekro.cli.main``"),
    )
    file = step.root / "tests/worker_fleet.py"
    text = file.read_text("utf-8")
    if not re.search(r"^import os$", text, re.M):
        file.write_text(text.replace("\nimport ", "\nimport os\nimport ", 1), "utf-8")
    step.edit(
        "tests/system/test_upgrade.py",
        (
            '''[sys.executable, "-P", "-m", "cli.main", *arguments]''',
            '''[sys.executable, "-P", "-m", main_module(environment), *arguments]''',
        ),
    )
    step.sub("tests/system/test_upgrade.py", r"from worker_fleet import ([^\n(]*)\n", r"from worker_fleet import \1, main_module\n")


def contexts(step: Step) -> None:
    """The module plays with names of our packages; the freed ones are ordinary now."""
    path = "tests/sdk/test_sdk_import_contexts.py"
    step.edit(
        path,
        ("import agent\nimport storage\n", "import storage\nimport workers\n"),
        (
            'NAMES = ("agent", "storage", "workers", "sandbox", "cli", "codec", "runtime", "messaging", "gateway", "utils")',
            'NAMES = ("nekro", "storage", "workers", "broker_config", "nekro_client", "utils")',
        ),
        # A cloned repository
        ('(repository / "lib" / "agent")', '(repository / "lib" / "workers")'),
        (
            '"thing", "import agent.core as core\\nfrom agent import core as found\\nfrom .storage import MORE"',
            '"thing", "import workers.core as core\\nfrom workers import core as found\\nfrom .storage import MORE"',
        ),
        ('(repository / "lib" / "agent" / "__init__.py")', '(repository / "lib" / "workers" / "__init__.py")'),
        (
            '(repository / "lib" / "agent" / "core.py").write_text("from agent.words import WHO',
            '(repository / "lib" / "workers" / "core.py").write_text("from workers.words import WHO',
        ),
        ('(repository / "lib" / "agent" / "words.py")', '(repository / "lib" / "workers" / "words.py")'),
        ('assert sys.modules["agent"] is agent and sys.modules["storage"] is storage', 'assert sys.modules["workers"] is workers and sys.modules["storage"] is storage'),
        # Plugins named like our packages
        ('for name in ("agent", "storage", "workers"):', 'for name in ("broker_config", "storage", "workers"):'),
        ('(tmp_path / "cli").mkdir()', '(tmp_path / "nekro").mkdir()'),
        (
            '(tmp_path / "cli" / "__init__.py").write_text(HEAD.format(name="cli") + "from cli.helper import X")',
            '(tmp_path / "nekro" / "__init__.py").write_text(HEAD.format(name="nekro") + "from nekro.helper import X")',
        ),
        ('(tmp_path / "cli" / "helper.py")', '(tmp_path / "nekro" / "helper.py")'),
        ('["Ada.agent", "Ada.cli", "Ada.storage", "Ada.workers"]', '["Ada.broker_config", "Ada.nekro", "Ada.storage", "Ada.workers"]'),
        (
            '''    assert sys.modules["agent"] is agent
    assert importlib.import_module("cli.exit_codes").__file__ == str(
        Path(agent.__file__).parents[1] / "cli" / "exit_codes.py"
    )
''',
            '''    assert sys.modules["workers"] is workers
    assert importlib.import_module("nekro.cli.exit_codes").__file__ == str(
        Path(workers.__file__).parents[1] / "nekro" / "cli" / "exit_codes.py"
    )
''',
        ),
        ('(vendor / "messaging.py")', '(vendor / "broker_config.py")'),
        ('importlib.util.find_spec("messaging")', 'importlib.util.find_spec("broker_config")'),
        ("assert Path(spec.origin).parents[1] == Path(agent.__file__).parents[1]", "assert Path(spec.origin).parents[1] == Path(workers.__file__).parents[1]"),
        # A dependency
        (
            '''        "agent": "from agent.parts import WHO",
        "uses_agent": "import agent\\nfrom storage import WHO\\n"
        "def lazily():\\n    import agent.parts\\n    return agent.parts.WHO",
''',
            '''        "workers": "from workers.crew import WHO",
        "uses_workers": "import workers\\nfrom storage import WHO\\n"
        "def lazily():\\n    import workers.crew\\n    return workers.crew.WHO",
''',
        ),
        ('(site / "agent" / "parts.py")', '(site / "workers" / "crew.py")'),
        ('code("user", "import agent as found") + "import uses_agent\\nboth = uses_agent.agent is found\\n"', 'code("user", "import workers as found") + "import uses_workers\\nboth = uses_workers.workers is found\\n"'),
        ("(module.uses_agent.WHO, module.uses_agent.lazily())", "(module.uses_workers.WHO, module.uses_workers.lazily())"),
        ('assert sys.modules["agent"] is agent and not hasattr(agent, "WHO")', 'assert sys.modules["workers"] is workers and not hasattr(workers, "WHO")'),
        ('contexts.installed_name("agent")', 'contexts.installed_name("workers")'),
        ('for name in ("uses_agent",):', 'for name in ("uses_workers",):'),
    )


def docs(step: Step) -> None:
    step.sub(
        "CONTRIBUTING.md",
        r"`nekro_client` ← `nekro_agent` ← .*? ← `cli`;",
        " ← ".join(f"`{name}`" for name in order(step)) + ";",
    )
    page = step.root / "docs/architecture.md"
    text = page.read_text("utf-8")
    for old, new in MOVES.items():
        text = text.replace(f"\n| `{old}/` |", f"\n| `{new}/` |")
    page.write_text(text, "utf-8")
    step.edit(
        "docs/lab/settings-and-constants.md",
        ("of time constants, `connectors`, `gateway` and `nekro_client`.", "of time constants, `nekro/extensions`, `nekro/gateway` and `nekro_client`."),
        optional=True,
    )
    step.edit("docs/plugins.md", ("(`agent`, `storage`, …)", "(`storage`, `workers`, …)"), optional=True)
    step.edit("docs/security.md", ("the runner inside (`sandbox/guest`)", "the runner inside (`nekro/sandbox/guest`)"), optional=True)


def order(step: Step) -> list[str]:
    text = (step.root / layers.FILE).read_text("utf-8")
    return re.findall(r'"([\w/]+)"', text.split("ORDER = (\n")[1].split("\n)\n")[0])
