"""The checks of `nekro doctor`."""
