"""A shop with customers, orders and articles: look-ups that need each other's results."""

from __future__ import annotations

from typing import Any, Final

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

from ._effects import note_effect

plugin = NekroPlugin(
    name="Shop",
    module_name="shop",
    description="Customers, orders and articles of a shop.",
    version="1.0.0",
    author="eval",
    url="",
)

_CUSTOMERS: Final = {
    "C-17": {"name": "Ada Lovelace", "city": "London"},
    "C-23": {"name": "Grace Hopper", "city": "New York"},
    "C-31": {"name": "Alan Turing", "city": "Manchester"},
}
#: Order: customer, articles with their number, state.
_ORDERS: Final[dict[str, tuple[str, dict[str, int], str]]] = {
    "O-101": ("C-17", {"A-1": 2, "A-4": 1}, "delivered"),
    "O-102": ("C-17", {"A-3": 3}, "open"),
    "O-103": ("C-23", {"A-2": 1}, "open"),
    "O-104": ("C-17", {"A-5": 1, "A-2": 2}, "open"),
    "O-105": ("C-31", {"A-1": 5}, "cancelled"),
}
#: Article: name, price in EUR, stock, supplier.
_ARTICLES: Final[dict[str, tuple[str, float, int, str]]] = {
    "A-1": ("lamp", 25.0, 12, "Lumen"),
    "A-2": ("desk", 180.0, 2, "Holz"),
    "A-3": ("chair", 75.5, 0, "Holz"),
    "A-4": ("clock", 32.0, 7, "Tick"),
    "A-5": ("shelf", 64.0, 3, "Holz"),
    "A-6": ("mirror", 48.0, 1, "Lumen"),
    "A-7": ("carpet", 120.0, 9, "Weave"),
}
_RATES: Final = {"USD": 1.1, "JPY": 160.0, "CHF": 0.95}


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Find a customer", "Find the id of a customer.")
async def find_customer(_ctx: AgentCtx, name: str) -> str:
    """Return the id of a customer by the full name.

    Args:
        name (str): First and last name, exactly.
    """
    for key, customer in _CUSTOMERS.items():
        if customer["name"] == name:
            return key
    raise ValueError(f"there is no customer {name!r}; search_customers finds similar names")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Search customers", "Search customers by a part.")
async def search_customers(_ctx: AgentCtx, part: str) -> list[dict[str, str]]:
    """Return the customers whose name or city contains a text, each with id, name and city.

    Args:
        part (str): Part of a name or city, in any case.
    """
    rows = [{"id": key, **customer} for key, customer in _CUSTOMERS.items()]
    return [row for row in rows if part.lower() in f"{row['name']} {row['city']}".lower()]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "List orders", "List the orders of a customer.")
async def list_orders(_ctx: AgentCtx, customer_id: str) -> list[str]:
    """Return the ids of a customer's orders, the oldest first.

    Args:
        customer_id (str): As `find_customer` returns it.
    """
    if customer_id not in _CUSTOMERS:
        raise ValueError(f"there is no customer id {customer_id!r}; ids look like C-17")
    return [key for key, (customer, _, _) in _ORDERS.items() if customer == customer_id]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Read an order", "Read an order.")
async def read_order(_ctx: AgentCtx, order_id: str) -> dict[str, Any]:
    """Return an order: id, customer, articles (number by sku) and state: open, delivered or cancelled.

    Args:
        order_id (str): As `list_orders` returns it.
    """
    if order_id not in _ORDERS:
        raise ValueError(f"there is no order {order_id!r}")
    customer, articles, state = _ORDERS[order_id]
    return {"id": order_id, "customer": customer, "articles": articles, "state": state}


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "List articles", "List all articles.")
async def list_articles(_ctx: AgentCtx) -> list[str]:
    """Return the skus of all articles."""
    return list(_ARTICLES)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Read an article", "Read an article.")
async def read_article(_ctx: AgentCtx, sku: str) -> dict[str, Any]:
    """Return an article: sku, name, price in EUR, stock and supplier.

    Args:
        sku (str): As `list_articles` returns it.
    """
    if sku not in _ARTICLES:
        raise ValueError(f"there is no article {sku!r}")
    name, price, stock, supplier = _ARTICLES[sku]
    return {"sku": sku, "name": name, "price": price, "stock": stock, "supplier": supplier}


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Exchange rate", "Rate of a currency.")
async def exchange_rate(_ctx: AgentCtx, currency: str) -> float:
    """Return what one EUR is in another currency.

    Args:
        currency (str): USD, JPY or CHF.
    """
    if currency not in _RATES:
        raise ValueError(f"no rate of {currency!r}; there are {', '.join(_RATES)}")
    return _RATES[currency]


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "Order stock", "Order an article from its supplier.")
async def order_stock(_ctx: AgentCtx, sku: str, count: int) -> str:
    """Order an article from its supplier.

    Args:
        sku (str): As `list_articles` returns it.
        count (int): How many, 1 to 100.
    """
    if sku not in _ARTICLES:
        raise ValueError(f"there is no article {sku!r}")
    if not 1 <= count <= 100:
        raise ValueError(f"count {count} is not between 1 and 100")
    note_effect(plugin, _ctx, "order", sku=sku, count=count)
    return f"Ordered {count} of {sku} from {_ARTICLES[sku][3]}."
