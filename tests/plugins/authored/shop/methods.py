from nekro_agent.api.schemas import AgentCtx
from nekro_agent.services.plugin.schema import SandboxMethodType

from .base import Currency, Shelf, ShopConfig, config, plugin
from .catalogue import price_of


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="price", description="Price of an item")
async def item_price(_ctx: AgentCtx, item: str) -> str:
    """Return the price of an item."""
    return f"{price_of(item)} {config.CURRENCY.value} {config.MODE}"


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, name="stock", description="Put an item on a shelf")
async def stock_item(_ctx: AgentCtx, shelf: str, item: str, price: float) -> None:
    """Put an item on a shelf, change the currency, and save."""
    config.SHELVES.append(Shelf(name=shelf, prices={item: price}))
    config.CURRENCY = Currency.YEN
    config.TAX.INCLUDED = False
    plugin.save_config(config)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="same")
async def same_config(_ctx: AgentCtx) -> list:
    """Whether what was read at import is what get_config gives."""
    now = plugin.get_config(ShopConfig)
    return [now is config, now.TOKEN.get_secret_value(), str(now.FOLDER), ShopConfig.get_field_placeholder("PROXY")]
