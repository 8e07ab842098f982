"""Basic methods of every agent: send a text, send a file, view a long text."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Basics",
    module_name="basic",
    description="Send messages and files to the chat and look at long texts.",
    version="1.0.0",
    author="nekro",
    url="",
)

_VIEW_CHARS = 8000


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Send a text", "Send a text message to a chat.")
async def send_msg_text(_ctx: AgentCtx, chat_key: str, message_text: str) -> None:
    """Send a text message to the chat. In a program this is the way to send text to people.

    Args:
        chat_key (str): Key of the chat; use `_ck` for the current one.
        message_text (str): The message; not empty.

    Example:
        send_msg_text(_ck, "Hello!")
    """
    if not message_text.strip():
        raise ValueError("message_text is empty")
    await _ctx.ms.send_text(_current(_ctx, chat_key), message_text, _ctx)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Send a file", "Send a file or an image to a chat.")
async def send_msg_file(_ctx: AgentCtx, chat_key: str, file_path: str) -> None:
    """Send a file or an image to the chat.

    Args:
        chat_key (str): Key of the chat; use `_ck` for the current one.
        file_path (str): A file in the working directory or in `/app/uploads`, or a URL.

    Example:
        send_msg_file(_ck, "plot.png")
    """
    send = _ctx.ms.send_image if _is_image(file_path) else _ctx.ms.send_file
    await send(_current(_ctx, chat_key), file_path, _ctx)


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "View a text", "Read a text before going on.")
async def view_str_content(_ctx: AgentCtx, value: str, start: int = 0) -> str:
    """Look at the content of a text, such as a file or a tool's result, in the next round.

    Args:
        value (str): The text to look at.
        start (int): First character to show, for texts longer than one view.

    Example:
        view_str_content(open("/app/uploads/report.txt").read())
    """
    text = str(value)
    shown = text[start : start + _VIEW_CHARS]
    rest = len(text) - start - len(shown)
    note = f"\n[{rest} more characters; go on with start={start + len(shown)}]" if rest > 0 else ""
    return f"Characters {start} to {start + len(shown)} of {len(text)}:\n{shown}{note}"


def _current(ctx: AgentCtx, chat_key: str) -> str:
    # The LLM chooses the key: it must not be able to write to other chats.
    if chat_key != ctx.chat_key:
        raise ValueError(f"chat_key {chat_key!r} is not the current chat; use _ck")
    return chat_key


def _is_image(path: str) -> bool:
    return path.lower().split("?", 1)[0].endswith((".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp"))
