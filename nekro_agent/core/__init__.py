"""Logger and global configuration.

``logger`` and ``config`` here are the objects; the modules of the same names are reached by
``from nekro_agent.core.logger import …`` all the same.
"""

from __future__ import annotations

from nekro_agent.core.config import config as config
from nekro_agent.core.logger import logger as logger

__all__ = ["config", "logger"]
