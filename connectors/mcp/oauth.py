"""OAuth of servers with a URL: the grant ``client_credentials``, which needs no person."""

from __future__ import annotations

import httpx2
from mcp.client.auth import TokenStorage
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from connectors.mcp.declarations import OAuth, resolve

__all__ = ["auth_of"]


def auth_of(declared: OAuth | None, url: str, *, name: str) -> httpx2.Auth | None:
    """Return what authenticates the requests of a session; None without OAuth."""
    if declared is None:
        return None
    return ClientCredentialsOAuthProvider(
        url,
        _InMemory(),
        resolve(declared.client_id, name=name),
        resolve(declared.client_secret, name=name),
        scope=declared.scope,
        issuer=resolve(declared.issuer, name=name),
    )


class _InMemory(TokenStorage):
    """Keeps tokens for one session: a new one costs a request and no person's time."""

    def __init__(self) -> None:
        self._tokens: OAuthToken | None = None
        self._client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info
