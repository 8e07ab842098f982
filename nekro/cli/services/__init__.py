"""Processes that commands start and talk to."""
