"""The local key of a gateway, as clients of its machine send it."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI

from broker_config.secret_files import secret_path
from nekro.app.services import Services

__all__ = ["local_environment", "local_headers", "local_headers_of"]


def local_headers(data_dir: Path) -> dict[str, str]:
    """Return the header with the key that a gateway on loopback has written."""
    return {"Authorization": f"Bearer {secret_path(data_dir, 'api.key').read_text('ascii').strip()}"}


def local_environment(url: str, home: Path) -> dict[str, str]:
    """Return the environment of a command that knows the gateway's URL and where the local key is."""
    data_dir = os.environ["NEKRO_DATA_DIR"]
    return {"NEKRO_URL": url, "NEKRO_DATA_DIR": data_dir, "HOME": str(home), "PATH": "/usr/bin:/bin"}


def local_headers_of(app: FastAPI) -> dict[str, str]:
    """Return the header for an application that has started; none if it does not listen on loopback."""
    services: Services | None = getattr(getattr(app, "state", None), "services", None)
    if services is None:
        return {}  # another application
    path = secret_path(services.settings.data_dir, "api.key")
    return local_headers(services.settings.data_dir) if path.exists() else {}
