"""Logger, global configuration and vector database."""

from __future__ import annotations

from nekro_agent.core.config import CoreConfig, ModelConfigGroup, config
from nekro_agent.core.logger import get_sub_logger, logger
from nekro_agent.core.vector_db import get_qdrant_client, get_qdrant_config

__all__ = [
    "CoreConfig",
    "ModelConfigGroup",
    "config",
    "get_qdrant_client",
    "get_qdrant_config",
    "get_sub_logger",
    "logger",
]
