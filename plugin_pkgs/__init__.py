"""The shipped plugins: plain Nekro Agent plugins, which import only ``nekro_agent``."""
