"""Rows of the HTTP API: keys, repeated requests, administrative acts."""
