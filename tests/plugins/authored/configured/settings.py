from typing import List

from pydantic import Field

from nekro_agent.api import i18n
from nekro_agent.api.plugin import ConfigBase, ExtraField, NekroPlugin

plugin = NekroPlugin(
    name="配置", module_name="configured", description="", version="1", author="Ada", url="", is_package=True
)


@plugin.mount_config()
class Config(ConfigBase):
    """Configuration."""

    API_KEY: str = Field(
        default="",
        title="密钥",
        json_schema_extra=ExtraField(
            is_secret=True,
            placeholder="sk-…",
            i18n_title=i18n.i18n_text(zh_CN="密钥", en_US="Key"),
            from_a_newer_version=True,
        ).model_dump(),
    )
    LIMIT: int = Field(default=3, ge=1)
    NAMES: List[str] = Field(default=["a"])


config: Config = plugin.get_config(Config)
