"""Queries, one repository per table."""
