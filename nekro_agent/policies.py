"""Limits, permissions and global values of the SDK: data that the application fills from settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.utils import canonicalize_name

__all__ = ["CoreConfig", "DownloadPolicy", "ModelConfigGroup", "PackagePolicy", "StorePolicy", "UploadPolicy"]


@dataclass(frozen=True, kw_only=True)
class StorePolicy:
    """Limits of ``plugin.store``."""

    max_value_bytes: int = 16 << 20


@dataclass(frozen=True, kw_only=True)
class DownloadPolicy:
    """Limits of downloads by URL, and options of their execution."""

    max_bytes: int = 20 << 30
    #: Longest time without data from a server.
    timeout_seconds: float = 60
    #: Host names and networks (CIDR) that are allowed although private, loopback or link-local.
    allow_private: tuple[str, ...] = ()
    #: Connections to one server for one large file.
    connections: int = 4
    #: Size from which a file is large.
    parallel_min_bytes: int = 64 << 20
    #: Consecutive attempts without new data before a download fails.
    tries: int = 5
    #: Half the pause before the second attempt; doubles with each further one.
    retry_seconds: float = 0.5


@dataclass(frozen=True, kw_only=True)
class UploadPolicy:
    """Quota of the uploads of one chat."""

    chat_bytes: int = 1 << 30
    #: Files and directories.
    chat_names: int = 2_000


@dataclass(frozen=True, kw_only=True)
class PackagePolicy:
    """What ``dynamic_import_pkg`` may install."""

    #: Distribution names; ``"*"`` allows all, an empty tuple none.
    allow: tuple[str, ...] = ("*",)

    def allows(self, name: str) -> bool:
        """Whether a distribution may be installed."""
        return "*" in self.allow or canonicalize_name(name) in map(canonicalize_name, self.allow)


@dataclass(frozen=True, kw_only=True)
class ModelConfigGroup:
    """One language model in the form that plugins of the reference read."""

    GROUP_NAME: str = "default"
    CHAT_MODEL: str = ""
    CHAT_PROXY: str = ""
    BASE_URL: str = ""
    API_KEY: str = field(default="", repr=False)
    MODEL_TYPE: str = "chat"
    ENABLE_VISION: bool = True
    ENABLE_COT: bool = False
    TEMPERATURE: float | None = None
    TOP_P: float | None = None
    TOP_K: int | None = None
    PRESENCE_PENALTY: float | None = None
    FREQUENCY_PENALTY: float | None = None
    EXTRA_BODY: str | None = None


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """Global values that plugins read as ``core.config``."""

    MODEL_GROUPS: Mapping[str, ModelConfigGroup] = field(default_factory=dict)
    USE_MODEL_GROUP: str = "default"
    DEFAULT_PROXY: str | None = None
    AI_CHAT_PRESET_NAME: str = "Agent"
    AI_CHAT_PRESET_SETTING: str = ""
    SUPER_USERS: tuple[str, ...] = ()

    def get_model_group_info(self, model_name: str) -> ModelConfigGroup:
        """Return a model group.

        Raises:
            KeyError: there is none of that name; the message lists the existing ones.
        """
        try:
            return self.MODEL_GROUPS[model_name]
        except KeyError:
            known = ", ".join(self.MODEL_GROUPS) or "none; set NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL"
            raise KeyError(f"no model group {model_name!r} (there are: {known})") from None

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"core.config has no {name}: this system is configured by NEKRO_ variables; "
            f"it offers {', '.join(sorted(self.__dataclass_fields__))}"
        )
