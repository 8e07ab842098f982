"""The Model Context Protocol, in both directions."""
