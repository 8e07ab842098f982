"""Require Flower's password for every request, also for the pages that Flower itself leaves open."""

from __future__ import annotations

import base64
import binascii
import hmac
from http import HTTPStatus
from typing import Any, Final

import flower.command
from flower.app import Flower
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest
from tornado.web import RequestHandler

from nekro_agent.errors import ServiceError

__all__ = ["guard_requests"]

#: What needs no password: it says `OK`.
_PROBE: Final = "/healthcheck"


def guard_requests() -> None:
    """Make the Flower that this process starts refuse requests without its password.

    Raises:
        ServiceError: this version of Flower has another structure and cannot be patched.
    """
    if getattr(flower.command, "Flower", None) is not Flower:
        raise ServiceError("cannot protect this Flower; install flower as constraints.txt says")

    class GuardedFlower(Flower):  # type: ignore[misc]
        """Checks the password of every request, before any handler is chosen."""

        def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate:
            # With Flower's own login (OAuth) a browser sends no password.
            is_admitted = self.options.auth or request.path == _PROBE or _has_password(self, request)
            delegate: HTTPMessageDelegate = (
                super().find_handler(request, **kwargs)
                if is_admitted
                else self.get_handler_delegate(request, _Refusal)
            )
            return delegate

    flower.command.Flower = GuardedFlower


def _has_password(served: Flower, request: HTTPServerRequest) -> bool:
    given = request.headers.get_list("Authorization")
    scheme, _, text = (given[0] if len(given) == 1 else "").partition(" ")
    try:
        sent = base64.b64decode(text.strip(), validate=True) if scheme.lower() == "basic" else b""
    except (binascii.Error, ValueError):
        return False
    # All are compared, so that the time does not tell which one is nearly right.
    return any([hmac.compare_digest(sent, one.encode()) for one in served.options.basic_auth or ()])


class _Refusal(RequestHandler):
    """Asks for the password."""

    def check_xsrf_cookie(self) -> None:
        """Ask a form for the password too."""

    def prepare(self) -> None:
        self.set_status(HTTPStatus.UNAUTHORIZED)
        self.set_header("WWW-Authenticate", 'Basic realm="flower"')
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish("Access denied: send the user and password of this Flower.\n")
