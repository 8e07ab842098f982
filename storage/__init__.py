"""Durable state in SQLite or PostgreSQL: whatever must survive a crash is committed before it is announced.

| module | contents |
|---|---|
| ``engine`` | ``Database``: transactions on any event loop, each with a time limit |
| ``transaction`` | ``Transaction``: every repository, and callbacks after the commit |
| ``tables``, ``states``, ``sql`` | tables, states of rows, column types and the database's clock |
| ``migrate`` | ``upgrade``, ``check``; the migrations are in the package |
| ``driver`` | connections to SQLite and PostgreSQL, and how statements reach them |
| ``repositories`` | chats, messages, rounds, calls, jobs, timers, leases, events and further rows |
| ``accounts`` | keys of the HTTP API, what they spend and store, approvals |
| ``listings`` | lists, figures and searches for people |
| ``outbound`` | what waits to leave the system |
| ``kv``, ``files``, ``timer_services`` | implementations of the SDK's ports |
| ``catalogue``, ``caller_reads`` | the catalogue as workers write it and as callers read it |
| ``retention`` | deletes rows that ended long ago |
"""
