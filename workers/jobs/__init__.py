"""Background jobs and downloads."""
