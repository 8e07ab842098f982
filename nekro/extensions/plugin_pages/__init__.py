"""What plugins serve over HTTP: webhooks, routes and pages; the gateway's half and the workers'."""

from __future__ import annotations
