"""Global configuration in the form that plugins of the reference read."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from nekro_agent import runtime
from nekro_agent.core import os_env
from nekro_agent.runtime import CoreConfig, ModelConfigGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

    SANDBOX_SHARED_HOST_DIR: str
    USER_UPLOAD_DIR: str

__all__ = ["SANDBOX_SHARED_HOST_DIR", "USER_UPLOAD_DIR", "CoreConfig", "ModelConfigGroup", "config"]


class _CurrentConfig:
    """Reads the values of this process at each access, so that it can be imported before they are known."""

    def __getattr__(self, name: str) -> object:
        return getattr(runtime.core_config(), name)

    def __dir__(self) -> Iterable[str]:
        return dir(runtime.core_config())


def __getattr__(name: str) -> str:
    if name in ("SANDBOX_SHARED_HOST_DIR", "USER_UPLOAD_DIR"):
        return str(getattr(os_env, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


config = cast("CoreConfig", _CurrentConfig())
