import base64
import hashlib
import os
from pathlib import Path
from typing import Optional

import aiofiles
import httpx
from fastapi import APIRouter

from nekro_agent.api.core import ModelConfigGroup, logger
from nekro_agent.api.core import config as core_config
from nekro_agent.api.plugin import SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.services.agent.creator import ContentSegment, OpenAIChatMessage
from nekro_agent.tools.common_util import limited_text_output
from nekro_agent.tools.path_convertor import convert_filename_to_container_path, convert_to_host_path, is_url_path

from .settings import DrawConfig, plugin

_last_mode: Optional[str] = None


def _model_group() -> Optional[ModelConfigGroup]:
    name = plugin.get_config(DrawConfig).USE_DRAW_MODEL_GROUP
    return core_config.MODEL_GROUPS[name] if name in core_config.MODEL_GROUPS else None


async def _render(prompt: str, size: str) -> bytes:
    global _last_mode
    config = plugin.get_config(DrawConfig)
    async with httpx.AsyncClient(timeout=config.TIMEOUT) as client:
        response = await client.get(config.ENDPOINT + "/draw", params={"prompt": prompt, "size": size})
        response.raise_for_status()
    _last_mode = response.headers.get("x-mode", "plain")
    return response.content


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="设置绘图服务", description="")
async def set_draw_service(_ctx: AgentCtx, endpoint: str) -> str:
    """Point to another service and keep it."""
    config = plugin.get_config(DrawConfig)
    config.ENDPOINT = endpoint
    plugin.save_config(config)
    return plugin.get_config().ENDPOINT


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="绘图", description="支持根据描述绘制图片")
async def draw(_ctx: AgentCtx, prompt: str, size: str = "1024x1024", refer_image: str = "") -> str:
    """Generate or modify images.

    Args:
        prompt (str): What to draw.
        size (str): Size of the image.
        refer_image (str): Optional sandbox path of an image to begin with.

    Returns:
        str: Sandbox path of the image.
    """
    if _model_group() is None:
        logger.debug("no model group for drawing")
    if refer_image and not is_url_path(refer_image):
        async with aiofiles.open(_ctx.fs.get_file(refer_image), "rb") as file:
            prompt += " like " + hashlib.md5(await file.read()).hexdigest()[:8]
    content = await _render(prompt, size)
    return await _ctx.fs.mixed_forward_file(content, file_name="sketch.png")


@plugin.mount_sandbox_method(SandboxMethodType.MULTIMODAL_AGENT, name="看图", description="看一张图片")
async def look_at(_ctx: AgentCtx, image: str, question: str = "What is it?") -> dict:
    """Look at an image again.

    Args:
        image (str): Sandbox path of the image.
    """
    msg = OpenAIChatMessage.create_empty("user")
    msg.add(ContentSegment.text_content(question))
    msg.add(ContentSegment.image_content_from_path(str(_ctx.fs.get_file(image))))
    return msg.to_dict()


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, name="发送缩略图", description="")
async def convert_and_send(_ctx: AgentCtx, shared_image: str) -> str:
    """Write a converted image beside one of the shared area, and send it."""
    source: Path = convert_to_host_path(Path(shared_image), _ctx.chat_key, container_key=_ctx.container_key)
    target = source.with_suffix(".thumb.png")
    target.write_bytes(base64.b64encode(source.read_bytes()))
    os.replace(target, target.with_name("thumb.png"))
    await _ctx.ms.send_image(_ctx.chat_key, "/app/shared/" + "thumb.png", ctx=_ctx)
    return limited_text_output(f"sent {convert_filename_to_container_path('thumb.png')}, mode {_last_mode}", 100)


@plugin.mount_router()
def create_router() -> APIRouter:
    router = APIRouter()

    @router.get("/mode")
    async def mode() -> dict:
        return {"mode": _last_mode}

    return router
