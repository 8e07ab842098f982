"""Accounts of the HTTP API: keys, what they spend and store, and approvals."""

from __future__ import annotations
