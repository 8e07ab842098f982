"""In-memory implementations of the SDK's services, for tests of plugin authors.

    async def test_greeting(tmp_path):
        async with InMemoryRuntime(plugin, data_dir=tmp_path) as world:
            outcome = await world.call("greet", "Ada", user_id="u1")
            assert outcome.value == "Hello Ada"
            assert world.messages.sent[0].text == "…"

Import this module before the plugin if the plugin uses names of the reference that do not
exist here. The same contract tests run on these services and on the real ones.
"""

from __future__ import annotations

from nekro.plugins.invoke import Outcome
from nekro_agent import placeholders
from nekro_agent.testing.background import InMemoryCronJobs, InMemoryJobs, InMemoryTimers
from nekro_agent.testing.memory import InMemoryMessages, InMemoryRecords, InMemoryStore, LocalAreas
from nekro_agent.testing.world import InMemoryRuntime

__all__ = [
    "InMemoryCronJobs",
    "InMemoryJobs",
    "InMemoryMessages",
    "InMemoryRecords",
    "InMemoryRuntime",
    "InMemoryStore",
    "InMemoryTimers",
    "LocalAreas",
    "Outcome",
]

placeholders.install()
