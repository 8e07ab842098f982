"""Session ids of the handshake versions, which any gateway can check: nothing is stored.

A session id is random, with a code that only processes of the fleet can compute, bound to the key that began
the session. Its only use is to name requests: a client cancels a request by its number within the session.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Final

from nekro.gateway.identity import Identity

__all__ = ["Sessions"]

_ID: Final = re.compile(r"([0-9a-f]{32})([0-9a-f]{64})")


class Sessions:
    """Makes and checks session ids."""

    def __init__(self, key: str) -> None:
        """
        Args:
            key: secret that all processes of the fleet share.
        """
        self._key = hashlib.sha256(b"nekro mcp sessions\0" + key.encode()).digest()

    def new(self, identity: Identity) -> str:
        """Return the id of a new session."""
        nonce = secrets.token_hex(16)
        return nonce + self._code(nonce, identity)

    def is_valid(self, session: str, identity: Identity) -> bool:
        """Whether a session was begun with the same key."""
        match = _ID.fullmatch(session)
        return match is not None and hmac.compare_digest(match[2], self._code(match[1], identity))

    def _code(self, nonce: str, identity: Identity) -> str:
        text = f"{nonce}\0{identity.key_id or ''}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()
