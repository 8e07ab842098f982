"""Connections and statements on SQLite and PostgreSQL."""
