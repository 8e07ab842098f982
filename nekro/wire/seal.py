"""Signatures with keys that are derived from the signing key, one per purpose.

A value signed for one purpose does not verify for another, because the keys differ.
"""

from __future__ import annotations

import hmac
from typing import Any, Final

from pydantic import SecretStr

from nekro.wire import plain_json

__all__ = ["APPROVAL", "CONSOLE", "CONSOLE_CSRF", "CONSOLE_LOGIN", "CONTROL", "TASK", "TICKET", "Seal"]

#: Task messages: ``nekro.broker.celery.admission``.
TASK: Final = "nekro task message 1"
#: Commands of remote control: ``nekro.broker.celery.remote_control``.
CONTROL: Final = "nekro control command 1"
#: Stream tickets: ``nekro.gateway.access.tickets``.
TICKET: Final = "nekro stream ticket 1"
#: Approvals of calls: ``nekro.app.approvals.seals``.
APPROVAL: Final = "nekro approval 1"
#: Cookies of the console, and what a request that changes something repeats:
#: ``nekro.gateway.access.sessions``.
CONSOLE: Final = "nekro console session 1"
CONSOLE_CSRF: Final = "nekro console request 1"
#: Codes of login links: ``nekro.gateway.access.login_codes``.
CONSOLE_LOGIN: Final = "nekro console login 1"


class Seal:
    """Signs lists of strings with HMAC-SHA256; thread-safe."""

    def __init__(self, key: SecretStr, *, purpose: str) -> None:
        """Derive the key.

        Args:
            key: ``broker_config.embedded.resolve_signing_key``.
            purpose: one of this module's constants.
        """
        derived = hmac.digest(key.get_secret_value().encode(), purpose.encode(), "sha256")
        #: HMAC state after the key and before any message; copied for each message.
        self._keyed = hmac.new(derived, digestmod="sha256")

    def sign(self, fields: list[str]) -> str:
        """Return the signature of a list of strings, in hexadecimal."""
        digest = self._keyed.copy()
        # JSON is unambiguous: no two lists have the same encoding.
        digest.update(plain_json.dump(fields))
        return digest.hexdigest()

    def fits(self, fields: list[str], signature: Any) -> bool:
        """Whether ``signature``, which may have any type, is the signature of this list."""
        # compare_digest raises for strings that are not ASCII.
        return (
            isinstance(signature, str)
            and signature.isascii()
            and hmac.compare_digest(self.sign(fields), signature)
        )
