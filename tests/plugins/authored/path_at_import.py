"""The data directory, used while the module is imported."""

import json

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="paths", module_name="path_at_import", description="", version="1", author="Ada", url=""
)

STATE_FILE = str(plugin.get_plugin_path()) + "/state.json"
DATA_ROOT = plugin.get_plugin_data_dir().parents[1]

with open(STATE_FILE, "w", encoding="utf-8") as file:
    json.dump({"imports": 1}, file)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "where")
async def where(_ctx: AgentCtx) -> dict:
    """Say where things are."""
    return {"state": STATE_FILE, "root": str(DATA_ROOT), "same": str(plugin.get_plugin_data_dir())}
