"""跑团骰子: a table of dice and character cards, in the manner of v1 plugins."""

import json
import random
import re
import time
from typing import Any, Dict, List, Literal, Optional

from pydantic import Field

from nekro_agent.api import core
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.core import logger
from nekro_agent.core.core_utils import ExtraField
from nekro_agent.services.plugin.base import ConfigBase, NekroPlugin, SandboxMethodType

plugin = NekroPlugin(
    name="跑团骰子",
    module_name="trpg_table",
    description="为群聊跑团提供骰子与角色卡",
    version="0.3.1",
    author="Ada",
    url="https://example.com/trpg",
    support_adapter=["onebot_v11", "test"],
)


@plugin.mount_config()
class TrpgConfig(ConfigBase):
    """跑团配置"""

    MAX_DICE: int = Field(default=20, title="最多骰子数", description="一次最多投掷的骰子数")
    DEFAULT_RULE: Literal["coc7", "dnd5e"] = Field(default="coc7", title="默认规则")
    API_KEY: str = Field(
        default="",
        title="角色卡服务密钥",
        json_schema_extra=ExtraField(is_secret=True, placeholder="sk-...", required=False).model_dump(),
    )


config: TrpgConfig = plugin.get_config(TrpgConfig)

_EXPRESSION = re.compile(r"^(?P<count>\d*)[dD](?P<sides>\d+)(?P<bonus>[+-]\d+)?$")
_last_roll: Dict[str, Dict[str, Any]] = {}


@plugin.mount_prompt_inject_method(name="trpg_prompt_inject", description="当前规则与角色卡")
async def trpg_prompt_inject(_ctx: AgentCtx) -> str:
    cards = json.loads(await plugin.store.get(_ctx.from_chat_key, "", "cards") or "{}")
    names = ", ".join(sorted(cards)) or "none"
    return f"Current rule: {config.DEFAULT_RULE}. Character cards: {names}."


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, name="掷骰", description="按表达式掷骰")
async def roll_dice(_ctx: AgentCtx, expression: str, reason: str = "", seed: Optional[int] = None) -> Dict[str, Any]:
    """Roll dice and think about the result.

    Args:
        expression (str): For example "3d6+1".
        reason (str): Why.
    """
    match = _EXPRESSION.match(expression.strip())
    if not match:
        raise ValueError(f"bad dice expression: {expression}")
    count = int(match["count"] or 1)
    if count > config.MAX_DICE:
        return {"error": f"at most {config.MAX_DICE} dice"}
    source = random.Random(seed)
    rolls = [source.randint(1, int(match["sides"])) for _ in range(count)]
    result = {"expression": expression, "rolls": rolls, "total": sum(rolls) + int(match["bonus"] or 0)}
    _last_roll[_ctx.from_chat_key] = {**result, "at": time.time(), "reason": reason}
    logger.info(f"{_ctx.from_chat_key} rolled {result}")
    return result


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "最近一次")
async def last_roll_total(_ctx: AgentCtx) -> Optional[int]:
    """Total of the last roll of this chat."""
    return _last_roll.get(_ctx.from_chat_key, {}).get("total")


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "保存角色卡")
async def save_card(_ctx: AgentCtx, name: str, stats: Dict[str, int], tags: List[str] = []) -> bool:
    """Save a character card.

    Args:
        name (str): Name of the character.
        stats (Dict[str, int]): Its values.
    """
    cards = json.loads(await plugin.store.get(chat_key=_ctx.from_chat_key, store_key="cards") or "{}")
    created = name not in cards
    cards[name] = {"stats": stats, "tags": tags, "owner": _ctx.from_user_id}
    await plugin.store.set(chat_key=_ctx.from_chat_key, store_key="cards", value=json.dumps(cards, ensure_ascii=False))
    # decorated functions of this plugin call each other
    total = await last_roll_total(_ctx)
    core.logger.success(f"card {name} saved, last roll {total}")
    return created


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "查看角色卡")
async def show_card(_ctx: AgentCtx, name: str) -> Dict[str, Any]:
    """Show a character card."""
    cards = json.loads(await plugin.store.get(chat_key=_ctx.from_chat_key, store_key="cards") or "{}")
    return cards[name]


@plugin.mount_on_channel_reset()
async def on_reset(_ctx: AgentCtx):
    _last_roll.pop(_ctx.from_chat_key, None)
    await plugin.store.delete(chat_key=_ctx.from_chat_key, store_key="cards")


@plugin.mount_cleanup_method()
async def clean_up():
    """清理插件"""
    _last_roll.clear()
