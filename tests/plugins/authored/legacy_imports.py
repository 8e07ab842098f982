"""Older import paths."""

from nekro_agent.api import i18n, message, schemas
from nekro_agent.core import logger
from nekro_agent.core.config import USER_UPLOAD_DIR
from nekro_agent.core.config import config as core_config
from nekro_agent.core.core_utils import ConfigBase as OldConfigBase
from nekro_agent.core.os_env import OsEnv
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.services.message import message as message_again
from nekro_agent.services.message.message_service import message_service as old_service
from nekro_agent.services.message_service import message_service
from nekro_agent.services.plugin.base import ConfigBase, NekroPlugin, SandboxMethodType
from nekro_agent.services.plugin.schema import SandboxMethodType as SameType
from nekro_agent.tools.common_util import limited_text_output
from nekro_agent.tools.path_convertor import (
    convert_filename_to_container_path,
    convert_to_container_path,
    get_sandbox_path,
)

plugin = NekroPlugin(
    name="legacy", module_name="legacy_imports", description="", version="1", author="Ada", url=""
)

assert SameType is SandboxMethodType and OldConfigBase is ConfigBase
assert message_again is message and old_service is message_service
assert schemas.AgentCtx is AgentCtx


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "legacy")
async def legacy_summary(ctx: AgentCtx, file: str) -> list:
    """Use them."""
    logger.success("legacy paths work")
    await message_service.push_system_message(chat_key=ctx.from_chat_key, agent_messages="noted")
    return [
        str(get_sandbox_path(file)),
        str(convert_to_container_path(file)) == str(convert_filename_to_container_path(file)),
        limited_text_output("x" * 200, 10),
        str(USER_UPLOAD_DIR).startswith(OsEnv.DATA_DIR),
        i18n.i18n_text(zh_CN="是", en_US="yes")["en-US"],
        core_config.DEFAULT_PROXY,
    ]
