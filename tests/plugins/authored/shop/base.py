import enum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, SecretStr, field_validator

from nekro_agent.api import i18n
from nekro_agent.services.plugin.base import ConfigBase, NekroPlugin
from nekro_agent.core.core_utils import ExtraField

plugin = NekroPlugin(
    name="店",
    module_name="shop",
    description="A shop",
    version="0.3.1",
    author="Ada",
    url="https://example.com/shop",
    i18n_name=i18n.i18n_text(zh_CN="店", en_US="Shop"),
)


class Currency(enum.Enum):
    EURO = "EUR"
    YEN = "JPY"


class Tax(BaseModel):
    RATE: float = Field(default=0.2, ge=0, lt=1)
    INCLUDED: bool = True


class Shelf(BaseModel):
    name: str
    prices: dict[str, float] = {}


@plugin.mount_config()
class ShopConfig(ConfigBase):
    """Configuration"""

    CURRENCY: Currency = Field(default=Currency.EURO, title="Currency")
    MODE: Literal["open", "closed"] = "open"
    TAX: Tax = Tax()
    SHELVES: list[Shelf] = [Shelf(name="fruit", prices={"apple": 1.0})]
    TOKEN: SecretStr = SecretStr("s3cret")
    FOLDER: Path = Path("goods")
    PROXY: str | None = Field(
        default=None,
        title="Proxy",
        json_schema_extra=ExtraField(placeholder="http://…", is_secret=True, shown_in="later").model_dump(),
    )

    @field_validator("MODE", mode="before")
    @classmethod
    def lower(cls, value):
        return value.lower() if isinstance(value, str) else value


# As many plugins do: read once at import, kept for ever.
config: ShopConfig = plugin.get_config(ShopConfig)
