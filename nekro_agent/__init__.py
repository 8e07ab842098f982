"""The plugin SDK, at the import paths that Nekro Agent plugins use."""
