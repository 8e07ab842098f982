"""Plugins of this system: finding, importing, describing and configuring them."""
