from ..base import config


def price_of(item: str) -> float:
    for shelf in config.SHELVES:
        if item in shelf.prices:
            factor = 1 if config.TAX.INCLUDED else 1 + config.TAX.RATE
            return round(shelf.prices[item] * factor, 2)
    raise KeyError(item)
