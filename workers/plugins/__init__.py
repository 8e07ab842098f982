"""Plugins in a worker: initialisation, reload, states, pinned plugins, publication."""
