"""A runtime with the services of a worker on a new database, for tests of plugin authors.

    async def test_greeting(tmp_path):
        async with InMemoryRuntime(plugin, data_dir=tmp_path) as world:
            outcome = await world.call("greet", "Ada", user_id="u1")
            assert outcome.value == "Hello Ada"
            assert world.messages.sent[0].text == "…"

Import this module before the plugin if the plugin uses names of the reference that do not
exist here. Background jobs run as tasks of the test's loop, the test fires timers, and messages of people
run no hooks.
"""

from __future__ import annotations

from nekro.plugins.invoke import Outcome
from nekro_agent import placeholders
from nekro_agent.testing.services import InMemoryJobs
from nekro_agent.testing.world import InMemoryRuntime

__all__ = ["InMemoryJobs", "InMemoryRuntime", "Outcome"]

placeholders.install()
