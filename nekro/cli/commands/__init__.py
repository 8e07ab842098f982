"""One module per command, each with `Args`, `register` and `run`."""
