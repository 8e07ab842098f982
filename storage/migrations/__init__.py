"""Alembic's environment and the migrations, in the wheel; ``storage.migrate`` runs them."""
