"""Older import path of the configuration base class."""

from __future__ import annotations

from nekro_agent.config import ConfigBase, ExtraField

__all__ = ["ConfigBase", "ExtraField"]
