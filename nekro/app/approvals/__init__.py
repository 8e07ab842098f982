"""Approval: calls that a person must permit before they run."""
