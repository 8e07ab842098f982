"""Step 3: what can be left out becomes nekro/extensions/NAME."""

import re

import step1
import step2
import layers
from engine import Step

MOVES = {
    # The client's side: servers of others as plugins.
    "nekro/extensions/mcp": "nekro/extensions/mcp/client",
    "workers/mcp": "nekro/extensions/mcp/worker",
    "nekro/gateway/mcp": "nekro/extensions/mcp/server",
    "nekro/gateway/openai": "nekro/extensions/openai",
    "nekro/gateway/adapters": "nekro/extensions/sse_adapter",
    "nekro/gateway/webhooks": "nekro/extensions/webhooks",
    "nekro/gateway/plugins": "nekro/extensions/plugin_pages",
    "workers/web": "nekro/extensions/plugin_pages/worker",
}
GONE = ("mcp", "openai", "plugins", "adapters", "webhooks")
MESSAGE = """Group what can be left out below nekro.extensions

MCP in both directions, the endpoint in OpenAI's form, the SSE adapter,
webhooks of chats, and the HTTP pages of plugins become
`nekro.extensions.mcp`, `.openai`, `.sse_adapter`, `.webhooks` and
`.plugin_pages`.

Pure moves by script, as in the commits before. The modules of the core
that import an extension are listed in `AGAINST_ORDER` of
tests/test_layers.py.
"""
KEEP_STRINGS = step2.KEEP_STRINGS


def run(step: Step) -> None:
    for old, new in MOVES.items():
        step.move(old, new)
    step.carry_out()
    step.create("nekro/extensions/mcp/__init__.py", '"""The Model Context Protocol, in both directions."""\n')
    step.sub("nekro/extensions/__init__.py", r'\A""".*?"""', '"""What can be left out: each extension brings its routes and services."""')
    tests(step)
    docs(step)
    step.rewrite(KEEP_STRINGS)
    after(step)
    step2.parts(step, ("nekro/extensions", "workers"))
    step.format()


def tests(step: Step) -> None:
    step.edit(
        "tests/client/test_answer_limits.py",
        ("its transport refuses encoded answers and bounds the others", "it refuses encoded answers and bounds the others"),
        optional=True,
    )
    file = step.root / layers.FILE
    text = file.read_text("utf-8")
    head, rest = text.split("PARTS = {\n", 1)
    head = head.replace('    "nekro/extensions",\n', "", 1).replace('    "nekro/gateway",\n', '    "nekro/gateway",\n    "nekro/extensions",\n', 1)
    rest = rest.replace('    "nekro/extensions": {"mcp": ()},\n', "", 1)
    block = re.search(r'^    "nekro/gateway": \{\n.*?^    \},\n', rest, re.M | re.S)[0]
    kept = block
    for name in GONE:
        kept = re.sub(rf'(?:^ +#[^\n]*\n)*^        "{name}": \([^)]*\),\n', "", kept, flags=re.M)
    file.write_text(head + "PARTS = {\n" + rest.replace(block, kept), "utf-8")


def after(step: Step) -> None:
    """Edits with new names that look like old ones."""
    step.edit(
        "tests/docs/test_settings_and_constants.py",
        (
            'LATER_PACKAGES = ("nekro.extensions.", "nekro.gateway.", "nekro_client.")\n',
            'LATER_PACKAGES = ("nekro.extensions.", "nekro.gateway.", "nekro_client.")\n'
            "#: Parts of extensions that run in workers, and are counted with them.\n"
            'OF_WORKERS = ("nekro.extensions.mcp.worker.", "nekro.extensions.plugin_pages.worker.")\n',
        ),
        ("return name.startswith(LATER_PACKAGES)", "return name.startswith(LATER_PACKAGES) and not name.startswith(OF_WORKERS)"),
    )


def docs(step: Step) -> None:
    step.sub(
        "CONTRIBUTING.md",
        r"`nekro_client` ← `nekro_agent` ← .*? ← `nekro/cli`;",
        " ← ".join(f"`{name}`" for name in step1.order(step)) + ";",
    )
    page = step.root / "docs/architecture.md"
    text = page.read_text("utf-8")
    text = re.sub(r"^\| `nekro/extensions/` \|[^\n]*\n", "", text, flags=re.M)
    text = re.sub(
        r"(^\| `nekro/gateway/` \|[^\n]*\n)",
        lambda m: m[1].replace(", `openai/`, `mcp/`, `plugins/`, `adapters/`, `webhooks/`, `console/`", ", `console/`")
        + "| `nekro/extensions/` | `mcp/`: servers of others as plugins (`client/`, `worker/`), and this system as a server"
        " (`server/`); `openai/`: the endpoint in OpenAI's form; `sse_adapter/`; `webhooks/`: events of chats for other"
        " systems; `plugin_pages/`: routes and pages of plugins |\n",
        text,
        flags=re.M,
    )
    text = text.replace("`ops/` (health, sweeps), `web/` (HTTP routes of plugins), `mcp/` (plugins of MCP servers) |", "`ops/` (health, sweeps) |")
    page.write_text(text, "utf-8")
