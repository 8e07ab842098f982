"""One module per command, each with `Args`, `EPILOG`, `run` and perhaps `run_over_gateway`."""
