"""What is known of the contexts of models: by the settings, and by what their endpoints refused."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Final

from loguru import logger

from broker_config.model_groups import ModelGroup
from broker_config.settings import AgentSettings
from nekro.agent.tokens.counter import TokenCounter, counter_of
from nekro.agent.tokens.limits import Limits, PromptRoom

__all__ = ["LEARNED_SECONDS", "ModelContexts"]

#: How long a length that an endpoint refused is avoided: its operator may load another model meanwhile.
LEARNED_SECONDS: Final = 3600.0
#: How endpoints state the length of a context. It is text of theirs: the number only lowers a limit.
_STATED: Final = re.compile(
    r"(?:context (?:length|window|size)|n_ctx)\D{0,40}?(\d{3,9})|> ?(\d{3,9}) maximum", re.IGNORECASE
)


class ModelContexts:
    """Finds the room of prompts; the learned part is that of this process.

    Args:
        find: returns the model group of a name, or of None; None if nothing is known of it.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        settings: AgentSettings,
        find: Callable[[str | None], ModelGroup | None] = lambda _name: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._find = find
        self._clock = clock
        #: By name of the group: the longest prompt, and until when that counts.
        self._learned: dict[str | None, tuple[int, float]] = {}
        #: By model.
        self._counters: dict[str, TokenCounter] = {}

    async def room(self, name: str | None) -> PromptRoom:
        """Return the room of a prompt for a model group; reading a tokenizer's table does not block."""
        group = self._find(name)
        longest, until = self._learned.get(name, (None, 0.0))
        if until <= self._clock():
            longest = None
        limits = Limits.of(
            self._settings, context=None if group is None else group.context_tokens, longest=longest
        )
        if group is None or not group.model:
            return PromptRoom(limits=limits)
        counter = self._counters.get(group.model)
        if counter is None:
            # Only the first use of a model may have to read the table of its tokenizer, so only that one
            # waits for a thread, which takes longer than building a prompt.
            counter = self._counters[group.model] = await asyncio.to_thread(counter_of, group.model)
        return PromptRoom(limits=limits, counter=counter)

    def learn(self, name: str | None, *, tokens: int, said: str) -> None:
        """Record that an endpoint of a group refused a prompt as too long.

        Args:
            tokens: those of the prompt by the group's counter.
            said: the endpoint's words, which may state the length of its context.
        """
        longest = tokens // 2
        stated = _STATED.search(said)
        if stated:
            context = int(stated[1] or stated[2])
            longest = min(tokens * 3 // 4, context - min(self._settings.answer_tokens, context // 2))
        self._learned[name] = (max(longest, 1), self._clock() + LEARNED_SECONDS)
        logger.bind(group=name, tokens=tokens, longest=longest).warning("context_learned")
