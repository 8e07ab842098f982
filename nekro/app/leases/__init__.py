"""Leases and claims that are renewed while their work runs."""
