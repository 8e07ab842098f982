"""Durable rows on SQLite or PostgreSQL: what must survive a crash is written here before it is announced.

| module | holds |
|---|---|
| ``engine`` | ``Database``: transactions on any event loop, each with an end |
| ``migrate`` | ``upgrade``, ``check``; the migrations are in the package |
| ``transaction`` | ``Transaction``: every repository, and callbacks after the commit |
| ``chats``, ``messages``, ``rounds``, ``calls`` | repositories of the agent's road |
| ``jobs``, ``job_signals``, ``timers``, ``leases``, ``marks``, ``records`` | the other repositories |
| ``kv``, ``areas``, ``timer_services`` | ports of the SDK |
| ``retention`` | deleting what ended long ago |
| ``models``, ``states``, ``types``, ``clock`` | tables, states, column types, the database's clock |
"""
