"""Ordinary functions as sandbox methods: they run beside the event loop, not on it."""

import threading
import time

import requests

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin(name="sync", module_name="sync_methods", description="", version="1", author="Ada", url="")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "sync")
def slow_thread_name(_ctx, seconds: float = 0) -> str:
    """Block for a while and say in which thread."""
    time.sleep(seconds)
    return threading.current_thread().name


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fetch")
def fetch_status(_ctx, url: str) -> int:
    """Fetch with a blocking client."""
    return requests.get(url, timeout=60).status_code
