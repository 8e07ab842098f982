"""Secrets that sign deliveries; they follow from the fleet's signing key and are not stored."""

from __future__ import annotations

import base64
import hmac

__all__ = ["webhook_secret"]


def webhook_secret(signing_key: str, webhook_id: str, version: int) -> str:
    """Return the secret of a webhook in the form of Standard Webhooks: ``whsec_<Base64>``."""
    purpose = f"nekro-workers webhook secret 1\0{webhook_id}\0{version}"
    secret = hmac.digest(signing_key.encode(), purpose.encode(), "sha256")
    return f"whsec_{base64.b64encode(secret).decode()}"
