"""Limits of a run: control groups, quotas, and the supervised guards."""
