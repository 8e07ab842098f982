"""Older import path of the method types."""

from __future__ import annotations

from nekro_agent.methods import SandboxMethod, SandboxMethodType

__all__ = ["SandboxMethod", "SandboxMethodType"]
