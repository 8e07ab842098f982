"""Its settings: ``NEKRO_TELEGRAPH__KEY``."""

from __future__ import annotations

from pydantic import Field, SecretStr

from broker_config.limits import SettingGroup

__all__ = ["TelegraphSettings"]


class TelegraphSettings(SettingGroup):
    """Settings of the extension that tests have."""

    key: SecretStr | None = Field(None, description="Text that each message must state; unset: none.")
    max_words: int = Field(50, ge=1, description="Most words of a message.")
