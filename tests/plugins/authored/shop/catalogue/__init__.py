from .prices import price_of
