"""Download model files once; keep them in the plugin's directory and their metadata in its store."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from pathlib import Path

from pydantic import BaseModel

from nekro_agent.api import core
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType, long_running, repeatable
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.downloads.download import fetch

plugin = NekroPlugin(
    name="Model store",
    module_name="model_store",
    description="Download model files and keep them for every chat.",
    version="1.0.0",
    author="nekro",
    url="",
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ModelInfo(BaseModel):
    """Metadata of a model, as stored."""

    name: str
    url: str
    #: Relative to the plugin's directory.
    file_path: str
    size_bytes: int
    sha256: str
    created_at: float


def _store_key(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"model name {name!r} must be letters, digits, '.', '_' and '-', at most 100")
    return f"model_info:{name}"


async def _info(name: str) -> ModelInfo | None:
    text = await plugin.store.get(store_key=_store_key(name))
    return ModelInfo.model_validate_json(text) if text else None


def _file(info: ModelInfo) -> Path:
    return plugin.get_plugin_data_dir() / info.file_path


def _serves(known: ModelInfo, url: str, sha256: str) -> bool:
    return known.url == url and sha256.lower() in ("", known.sha256) and _file(known).is_file()


class _Shown:
    """Reports the progress and the rate of a download."""

    def __init__(self, ctx: AgentCtx) -> None:
        self._ctx = ctx
        self._since: tuple[float, int] | None = None

    def __call__(self, done_bytes: int, whole_bytes: int | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now, done_bytes  # bytes of an earlier attempt do not count for the rate
        began, first = self._since
        rate = f", {_size(int((done_bytes - first) / (now - began)))}/s" if now > began else ""
        percent = 100 * done_bytes / whole_bytes if whole_bytes else 0
        self._ctx.report_progress(percent, f"{_size(done_bytes)} of {_size(whole_bytes)}{rate}")


def _size(count: int | None) -> str:
    return "unknown size" if count is None else f"{count / (1 << 20):.1f} MiB"


@long_running
@repeatable
@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "Download a model", "Download a model file.")
async def download_model(_ctx: AgentCtx, model_url: str, model_name: str, sha256: str = "") -> str:
    """Download a model file and keep it under a name; takes a while for large files.

    Args:
        model_url (str): http(s) URL of the file.
        model_name (str): Name to keep it under: letters, digits, ".", "_" and "-".
        sha256 (str): Expected SHA-256 in hexadecimal; "" accepts any content.

    Returns:
        str: What was done.

    Example:
        download_model("https://example.com/tiny.gguf", "tiny")
    """
    store_key = _store_key(model_name)
    known = await _info(model_name)
    if known is not None and _serves(known, model_url, sha256):
        return f"Model {model_name!r} is already here ({known.size_bytes} bytes)."
    relative = f"models/{model_name}.model"

    result = await fetch(
        model_url,
        plugin.get_plugin_data_dir() / relative,
        sha256=sha256 or None,
        progress=_Shown(_ctx),
    )
    info = ModelInfo(
        name=model_name,
        url=model_url,
        file_path=relative,
        size_bytes=result.size_bytes,
        sha256=result.sha256,
        created_at=time.time(),
    )
    await plugin.store.set(store_key=store_key, value=info.model_dump_json())
    core.logger.bind(model=model_name, bytes=info.size_bytes).success("model_downloaded")
    return f"Model {model_name!r} downloaded: {info.size_bytes} bytes, SHA-256 {info.sha256}."


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Load a model", "Check a downloaded model.")
async def load_model(_ctx: AgentCtx, model_name: str, to_sandbox: bool = False) -> dict[str, str | int]:
    """Check that a downloaded model is whole, and optionally bring it into the sandbox.

    Args:
        model_name (str): Name that `download_model` was given.
        to_sandbox (bool): Whether to put the file into `/app/shared` and return its path.

    Returns:
        dict: name, size_bytes, sha256 and, with to_sandbox, path.
    """
    info = await _info(model_name)
    if info is None or not _file(info).is_file():
        raise ValueError(f"there is no model {model_name!r}; call download_model first")
    if await asyncio.to_thread(_sha256, _file(info)) != info.sha256:
        raise ValueError(f"model {model_name!r} is damaged on disk; download it again")
    answer: dict[str, str | int] = {"name": info.name, "size_bytes": info.size_bytes, "sha256": info.sha256}
    if to_sandbox:
        answer["path"] = await _ctx.fs.mixed_forward_file(_file(info), file_name=f"{model_name}.model")
    return answer


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
