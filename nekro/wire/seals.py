"""Signatures with the fleet's signing key: seals of values, and of HTTP requests to plugins.

``Seal`` has a key of its own per purpose, derived from the signing key: a value signed for one purpose does
not verify for another.

``HttpSigner`` signs the requests that a gateway sends to the HTTP servers of plugins on workers. The
signature says that the request comes from a process with the signing key. It covers the method, the path
with its query, and the plugin; a random number makes each usable once. The answer carries a proof of the
same key, so a gateway does not take the answer of another program that listens on the port of a worker that
has ended.

``x-nekro-signature: <issued at, ms>.<random>.<HMAC-SHA256, hexadecimal>``
``x-nekro-proof: <HMAC-SHA256 of the random, hexadecimal>``
``x-nekro-caller: <HMAC-SHA256 with the signature, hexadecimal>.<whose request it is>``, if that is known
"""

from __future__ import annotations

import hmac
from os import urandom
from typing import Any, Final

from pydantic import SecretStr

from nekro.wire import plain_json
from nekro_agent.errors import MessageRefusedError
from nekro_agent.shared_clock import shared_now

__all__ = [
    "APPROVAL",
    "CALLER_HEADER",
    "CONSOLE",
    "CONSOLE_CSRF",
    "CONSOLE_LOGIN",
    "CONTROL",
    "PACKAGE",
    "PROGRAM",
    "PROOF_HEADER",
    "SIGNATURE_HEADER",
    "TASK",
    "TICKET",
    "HttpSigner",
    "HttpVerifier",
    "ProgramSecrets",
    "Seal",
    "hash_seed",
]

#: Task messages: ``nekro.broker.celery.tasks``.
TASK: Final = "nekro task message 1"
#: Commands of remote control: ``nekro.broker.celery.remote_control``.
CONTROL: Final = "nekro control command 1"
#: Stream tickets: ``nekro.gateway.access.signed_texts``.
TICKET: Final = "nekro stream ticket 1"
#: Approvals of calls: ``nekro.app.approvals.requests``.
APPROVAL: Final = "nekro approval 1"
#: Archives of packages that plugins import: ``nekro.plugins.stored_packages``.
PACKAGE: Final = "nekro plugin package 1"
#: Cookies of the console, and what a request that changes something repeats:
#: ``nekro.gateway.access.sessions``.
CONSOLE: Final = "nekro console session 1"
CONSOLE_CSRF: Final = "nekro console request 1"
#: Codes of login links: ``nekro.gateway.access.signed_texts``.
CONSOLE_LOGIN: Final = "nekro console login 1"

#: Secrets of programs, and the order of their sets: ``ProgramSecrets``, ``hash_seed``.
PROGRAM: Final = "nekro program seed 1"


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


class ProgramSecrets:
    """What is the same in each attempt of a program, and unknown to other programs.

    Each method takes the id of the round, or of a run without one, and returns 64 hexadecimal digits.
    """

    def __init__(self, key: SecretStr) -> None:
        """Derive them from ``broker_config.embedded.resolve_signing_key``."""
        self._seal = Seal(key, purpose=PROGRAM)

    def seed(self, run_id: str) -> str:
        """The source of the program's random numbers, which it knows; see ``RunRequest.seed``."""
        return self._seal.sign(["random", run_id])

    def ids(self, run_id: str) -> str:
        """The key of the ids of its calls."""
        return self._seal.sign(["ids", run_id])

    def check_word(self, run_id: str) -> str:
        """The source of the one-time word in the prompt of its round."""
        return self._seal.sign(["check word", run_id])


def hash_seed(key: SecretStr) -> int:
    """Return this installation's ``SandboxDriver.hash_seed``; ``key`` as in ``ProgramSecrets``."""
    return int(Seal(key, purpose=PROGRAM).sign(["hash"])[:8], 16)


SIGNATURE_HEADER: Final = "x-nekro-signature"

PROOF_HEADER: Final = "x-nekro-proof"

CALLER_HEADER: Final = "x-nekro-caller"
#: How far the clocks of gateway and worker, and the request's way, may differ.
_VALID_SECONDS: Final = 30.0
#: Most random numbers remembered; with more requests in a minute, further ones are refused.
_MOST_SEEN: Final = 200_000


class _Keyed:
    def __init__(self, key: str) -> None:
        # A key of its own, so that no signature of a call can be passed off as one of a request.
        derived = hmac.digest(key.encode(), b"nekro-workers plugin http 1", "sha256")
        self._keyed = hmac.new(derived, digestmod="sha256")

    def _digest(self, *parts: str) -> str:
        digest = self._keyed.copy()
        for part in parts:
            data = part.encode("utf-8", "surrogateescape")
            digest.update(b"%d:" % len(data) + data)
        return digest.hexdigest()

    def proof(self, random: str) -> str:
        """Return the answer's proof for the random number of a request."""
        return self._digest("answer", random)


class HttpSigner(_Keyed):
    """The gateway's side."""

    def sign(self, *, method: str, target: str, plugin_key: str) -> tuple[str, str]:
        """Return the header of a request, and the proof that its answer must carry.

        Args:
            target: path and query as they are sent.
        """
        random, issued_at = urandom(16).hex(), str(int(shared_now() * 1000))
        digest = self._digest("request", issued_at, random, method, target, plugin_key)
        return f"{issued_at}.{random}.{digest}", self.proof(random)

    def vouch(self, caller: str, *, signature: str) -> str:
        """Return the header that states whose the request with this signature is."""
        return f"{self._digest('caller', signature, caller)}.{caller}"


class HttpVerifier(_Keyed):
    """The worker's side; used on one event loop."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        #: Random numbers of the last minute or so, and when they may be forgotten.
        self._seen: dict[str, float] = {}

    def verify(self, header: str, *, method: str, target: str, plugin_key: str) -> str:
        """Return the proof for the answer to a request.

        Raises:
            MessageRefusedError: the header is missing, was not made with this key for this request, is too
                old, or was used before.
        """
        issued_at, _, rest = header.partition(".")
        random, _, digest = rest.partition(".")
        expected = self._digest("request", issued_at, random, method, target, plugin_key)
        if not digest.isascii() or not hmac.compare_digest(expected, digest):
            raise MessageRefusedError("request refused: it is not signed with the key of this fleet")
        now = shared_now()
        if not abs(now - int(issued_at) / 1000) <= _VALID_SECONDS:
            raise MessageRefusedError("request refused: its signature is too old")
        self._forget(now)
        if random in self._seen or len(self._seen) >= _MOST_SEEN:
            raise MessageRefusedError("request refused: its signature was used before")
        self._seen[random] = now + 2 * _VALID_SECONDS
        return self.proof(random)

    def caller(self, header: str, *, signature: str) -> str:
        """Return whose the request with this signature is, as the gateway states it.

        Raises:
            MessageRefusedError: the header was not made with this key for this request.
        """
        digest, _, caller = header.partition(".")
        expected = self._digest("caller", signature, caller)
        if not digest.isascii() or not hmac.compare_digest(expected, digest):
            raise MessageRefusedError("request refused: its caller is not signed with the key of this fleet")
        return caller

    def _forget(self, now: float) -> None:
        # Added in order of time, so the first ones are the oldest.
        while self._seen and next(iter(self._seen.values())) < now:
            del self._seen[next(iter(self._seen))]
