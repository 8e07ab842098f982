"""Logger and global configuration."""

from __future__ import annotations

from nekro_agent.core.config import CoreConfig, ModelConfigGroup, config
from nekro_agent.core.logger import get_sub_logger, logger

__all__ = ["CoreConfig", "ModelConfigGroup", "config", "get_sub_logger", "logger"]
