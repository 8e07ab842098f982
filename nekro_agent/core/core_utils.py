"""Older import path of the base class of configurations."""

from __future__ import annotations

from nekro_agent.config import ConfigBase, ExtraField

__all__ = ["ConfigBase", "ExtraField"]
