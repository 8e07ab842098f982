"""Logger and global configuration.

``logger`` here is the logger itself; ``nekro_agent.core.logger`` is also a module, which
``from nekro_agent.core.logger import …`` reaches all the same.
"""

from __future__ import annotations

from nekro_agent.core.logger import logger as logger

__all__ = ["logger"]
