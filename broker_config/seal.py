"""Signatures under keys that are derived from the signing key, one for each purpose.

A value signed for one purpose does not verify for another: the key differs.
"""

from __future__ import annotations

import hmac
from typing import Any, Final

from pydantic import SecretStr

from broker_config import plain_json

__all__ = ["CONTROL", "TASK", "Seal"]

#: Task messages: ``broker_config.admission``.
TASK: Final = "nekro task message 1"
#: Commands of remote control: ``broker_config.remote_control``.
CONTROL: Final = "nekro control command 1"


class Seal:
    """Signs lists of texts with HMAC-SHA256; thread-safe."""

    def __init__(self, key: SecretStr, *, purpose: str) -> None:
        """Derive the key.

        Args:
            key: ``broker_config.embedded.resolve_signing_key``.
            purpose: one of this module's constants.
        """
        derived = hmac.digest(key.get_secret_value().encode(), purpose.encode(), "sha256")
        #: Has taken the key and no message yet; each message continues from a copy.
        self._keyed = hmac.new(derived, digestmod="sha256")

    def sign(self, fields: list[str]) -> str:
        """Return the signature of a list of texts, in hexadecimal."""
        digest = self._keyed.copy()
        # JSON keeps the fields apart: no two lists are written alike.
        digest.update(plain_json.dump(fields))
        return digest.hexdigest()

    def fits(self, fields: list[str], signature: Any) -> bool:
        """Whether a signature, of any type, is the one of this list."""
        # compare_digest raises at texts that are not ASCII.
        return (
            isinstance(signature, str)
            and signature.isascii()
            and hmac.compare_digest(self.sign(fields), signature)
        )
