"""The scripted tour: its scenes, its plugin, its own services, what it checks."""
