"""What plugins serve over HTTP: webhooks, routes and pages; the gateway's half and the workers'."""

from __future__ import annotations

from typing import Final

from nekro.app.extensions import Extension

__all__ = ["EXTENSION"]

EXTENSION: Final = Extension(
    name="plugin_pages",
    gateway="nekro.extensions.plugin_pages.proxy:GATEWAY_PART",
    worker="nekro.extensions.plugin_pages.hosts:PluginHosts",
)
