"""Older import path of the method types."""

from __future__ import annotations

from nekro_agent.methods import PromptInjectMethod, SandboxMethod, SandboxMethodType, WebhookMethod

__all__ = ["PromptInjectMethod", "SandboxMethod", "SandboxMethodType", "WebhookMethod"]
