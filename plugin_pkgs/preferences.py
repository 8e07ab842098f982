"""Store preferences: of a user in all chats, of a chat, or global."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Preferences",
    module_name="preferences",
    description="Remember preferences per user, per chat or globally.",
    version="1.0.0",
    author="nekro",
    url="",
)

_SCOPES = ("user", "chat", "global")


def _scope(ctx: AgentCtx, scope: str) -> dict[str, str]:
    if scope == "user":
        if ctx.from_user_id is None:
            raise ValueError('no user triggered this: use scope="chat" or scope="global"')
        return {"user_key": ctx.from_user_id}
    if scope == "chat":
        return {"chat_key": ctx.chat_key}
    if scope == "global":
        return {}
    raise ValueError(f"scope {scope!r} does not exist; use one of {', '.join(_SCOPES)}")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Set a preference", "Remember a preference.")
async def set_preference(_ctx: AgentCtx, name: str, value: str, scope: str = "user") -> bool:
    """Remember a preference.

    Args:
        name (str): Name, for example "language".
        value (str): Value.
        scope (str): "user" (in all chats), "chat" or "global".

    Returns:
        bool: True when it is new, False when an older value was replaced.

    Example:
        set_preference("language", "ja")
    """
    result = await plugin.store.set(**_scope(_ctx, scope), store_key=f"preference:{name}", value=value)
    return result == 0


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Get a preference", "Recall a preference.")
async def get_preference(_ctx: AgentCtx, name: str, scope: str = "user", default: str = "") -> str:
    """Recall a preference.

    Args:
        name (str): Name.
        scope (str): "user", "chat" or "global".
        default (str): What to return when nothing was remembered.

    Returns:
        str: The value.
    """
    value = await plugin.store.get(**_scope(_ctx, scope), store_key=f"preference:{name}")
    return default if value is None else value


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "Forget a preference", "Forget a preference.")
async def forget_preference(_ctx: AgentCtx, name: str, scope: str = "user") -> str:
    """Forget a preference.

    Args:
        name (str): Name.
        scope (str): "user", "chat" or "global".

    Returns:
        str: What was done.
    """
    missing = await plugin.store.delete(**_scope(_ctx, scope), store_key=f"preference:{name}")
    return f"There was no preference {name!r}." if missing else f"Preference {name!r} forgotten."
