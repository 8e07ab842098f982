"""Commands: responses."""

from __future__ import annotations

from nekro_agent.commands.registration import CmdCtl

__all__ = ["CmdCtl"]
