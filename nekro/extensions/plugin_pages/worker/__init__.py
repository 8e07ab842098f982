"""The HTTP routes and pages of plugins, served to gateways."""
