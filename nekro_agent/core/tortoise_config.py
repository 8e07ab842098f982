"""The database of plugins that bring tables of their own."""

from __future__ import annotations

from nekro_agent import layout, runtime
from nekro_agent.files.private_files import make_directory

__all__ = ["resolve_db_url"]


def resolve_db_url() -> str:
    """Return the address of a database for tables of plugins, in the form of Tortoise: ``sqlite://<path>``.

    It is one SQLite file of the data root for all plugins. The tables of this system are not in it: chats,
    messages and users are reached through ``nekro_agent.models``.
    """
    file = layout.plugin_database(runtime.data_root())
    make_directory(file.parent)
    return f"sqlite://{file}"
