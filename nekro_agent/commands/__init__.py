"""Plugin commands (``/weather Tokyo``): parsing, checks and execution."""
