"""The scripted tour of `nekro demo`: scenes, a plugin, services of its own, and checks."""
