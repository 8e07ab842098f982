"""Plugins that ship with the system: plain Nekro Agent plugins, which import ``nekro_agent`` only."""
