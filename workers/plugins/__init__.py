"""Loading plugins: discovery, initialisation, the registry of methods, lanes and pinned plugins."""
