"""Alembic's environment and the migrations; ``storage.migrate`` runs them."""
