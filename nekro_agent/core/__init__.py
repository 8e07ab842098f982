"""Logger and global configuration.

``logger`` and ``config`` are objects here; the modules of the same names can still be imported with
``from nekro_agent.core.logger import …``.
"""

from __future__ import annotations

from nekro_agent.core.config import config as config
from nekro_agent.core.logger import logger as logger

__all__ = ["config", "logger"]
