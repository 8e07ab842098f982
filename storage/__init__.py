"""Durable state in SQLite or PostgreSQL: whatever must survive a crash is committed before it is announced.

| module | contents |
|---|---|
| ``engine`` | ``Database``: transactions on any event loop, each with a time limit |
| ``migrate`` | ``upgrade``, ``check``; the migrations are in the package |
| ``transaction`` | ``Transaction``: every repository, and callbacks after the commit |
| ``chats``, ``messages``, ``rounds``, ``calls`` | repositories of chats, their history, rounds and calls |
| ``jobs``, ``job_signals``, ``timers``, ``leases``, ``lane_overrides``, ``records`` | further repositories |
| ``kv``, ``areas``, ``timer_services`` | implementations of the SDK's ports |
| ``retention`` | deletes rows that ended long ago |
| ``models``, ``states``, ``types``, ``clock`` | tables, states, column types, the database's clock |
"""
