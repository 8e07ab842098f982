"""Commands: what people type (``/weather Tokyo``), parsed, checked and run."""
