"""One module per command, each with `Args`, `EPILOG` and `run`."""
