"""Another import path of the message API."""

from __future__ import annotations

from nekro_agent.api.message import download_from_url, push_system, send_file, send_image, send_text

__all__ = ["download_from_url", "push_system", "send_file", "send_image", "send_text"]
