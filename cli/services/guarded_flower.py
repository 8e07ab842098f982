"""Check the Host header of Flower's requests while it has no password, which prevents DNS rebinding."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import flower.command
from flower.app import Flower
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest
from tornado.web import RequestHandler

from nekro_agent.errors import ServiceError
from workers.ops.host_header import AllowedHosts

__all__ = ["guard_hosts"]

_REFUSAL = (
    "This Flower has no password: it answers to localhost, 127.0.0.1, [::1] and hosts that were allowed. "
    "Open it under one of these, set FLOWER_BASIC_AUTH, or start it with `nekro flower --allow-host NAME`.\n"
)


def guard_hosts(names: Iterable[str]) -> None:
    """Make the Flower that this process starts refuse requests for other hosts.

    Args:
        names: hosts besides the loopback names.

    Raises:
        ServiceError: this version of Flower has another structure and cannot be patched.
    """
    if getattr(flower.command, "Flower", None) is not Flower:
        raise ServiceError("cannot check Host headers of this Flower; install flower as constraints.txt says")
    hosts = AllowedHosts(names)

    class GuardedFlower(Flower):  # type: ignore[misc]
        """Checks the Host header of every request, before any handler is chosen."""

        def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate:
            has_password = self.options.basic_auth or self.options.auth
            admitted = has_password or hosts.admits(request.headers.get_list("Host"))
            delegate: HTTPMessageDelegate = (
                super().find_handler(request, **kwargs)
                if admitted
                else self.get_handler_delegate(request, _Refusal)
            )
            return delegate

    flower.command.Flower = GuardedFlower


class _Refusal(RequestHandler):
    """Answers any request with the reason for its refusal."""

    def prepare(self) -> None:
        self.set_status(HTTPStatus.MISDIRECTED_REQUEST)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(_REFUSAL)
