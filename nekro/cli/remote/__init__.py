"""The commands that work over a gateway: one module per command, chosen by `NEKRO_URL` in
``nekro.cli.main``."""
