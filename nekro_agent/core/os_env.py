"""Host directories as constants, for plugins that build paths themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nekro_agent import runtime

__all__ = ["DATA_DIR", "SANDBOX_SHARED_HOST_DIR", "USER_UPLOAD_DIR", "OsEnv"]

if TYPE_CHECKING:
    DATA_DIR: str
    SANDBOX_SHARED_HOST_DIR: str
    USER_UPLOAD_DIR: str


class _OsEnvMeta(type):
    @property
    def DATA_DIR(cls) -> str:
        """Data root."""
        return str(runtime.data_root())


class OsEnv(metaclass=_OsEnvMeta):
    """Environment of the installation."""


def __getattr__(name: str) -> str:
    # Read at each access, because the data root may be set after this module was imported.
    below = {"DATA_DIR": ".", "USER_UPLOAD_DIR": "uploads", "SANDBOX_SHARED_HOST_DIR": "sandboxes"}
    if name in below:
        return str(runtime.data_root() / below[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
