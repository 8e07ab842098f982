"""Create the clients that the settings select, and ask the model groups of a chat in order until one
answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from loguru import logger

from broker_config.model_groups import DEFAULT_GROUP, ModelGroup, chat_groups, model_groups
from broker_config.settings import LLMSettings, Settings
from nekro.agent.llm.port import FailedGroup, LLMAnswer, LLMClient, LLMRequest
from nekro.agent.llm.scripted_client import ScriptedClient
from nekro_agent.errors import (
    LLMContextError,
    LLMError,
    LLMFilterError,
    LLMRefusedError,
    ModelGroupError,
)

__all__ = [
    "BREAKER_SECONDS",
    "ModelRouter",
    "create_client",
    "create_models",
]


#: How long a group that failed is asked after its fallbacks; a restart of an endpoint takes about as long.
BREAKER_SECONDS: Final = 60.0
#: Faults of one prompt, which say nothing about the group's next one.
_OF_THE_PROMPT: Final = (LLMContextError, LLMFilterError, LLMRefusedError)


class ModelRouter:
    """Asks the group of a request, then its fallbacks.

    Each fault of a group's endpoint passes the request on, after the group's own tries: another endpoint has
    another key, load, context length and filter, and accepts other parameters. A group that failed because
    of its endpoint is asked last for ``BREAKER_SECONDS``; a group is never skipped. The state is that of
    this process.

    Args:
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        settings: Settings,
        create: Callable[[ModelGroup], LLMClient],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._create = create
        self._clock = clock
        self._clients: dict[str, LLMClient] = {}
        #: Until when a group that failed is asked last.
        self._open_until: dict[str, float] = {}
        # Without a default model, rounds of most chats would fail: that is an error at the start.
        self._client(model_groups(settings)[DEFAULT_GROUP])

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Return the answer of the first group that gives one; see ``LLMClient``."""
        failures: list[LLMError] = []
        failed: list[FailedGroup] = []
        tries = 0
        for group in self._in_order(request):
            try:
                answer = await self._client(group).complete(_for_group(request, group, tries))
            except LLMError as exc:
                tries += exc.tries
                failures.append(exc)
                failed.append(FailedGroup(group=group.name, model=group.model, code=exc.code, error=str(exc)))
                self._note(group, exc)
                continue
            self._open_until.pop(group.name, None)
            return replace(answer, group=group.name, failed=tuple(failed), tries=tries + answer.tries)
        raise _joined(failures, failed, tries)

    async def close(self) -> None:
        """Close the connections of all groups."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()

    def _in_order(self, request: LLMRequest) -> list[ModelGroup]:
        try:
            groups = chat_groups(self._settings, request.group or DEFAULT_GROUP)
        except ModelGroupError as exc:
            logger.bind(chat_key=request.chat_key, group=request.group, error=str(exc)).warning(
                "llm_group_unknown"
            )
            groups = chat_groups(self._settings, DEFAULT_GROUP)
        now = self._clock()
        return sorted(groups, key=lambda group: self._open_until.get(group.name, 0.0) > now)

    def _note(self, group: ModelGroup, exc: LLMError) -> None:
        if not isinstance(exc, _OF_THE_PROMPT):
            self._open_until[group.name] = self._clock() + BREAKER_SECONDS
        logger.bind(group=group.name, model=group.model, code=exc.code, error=str(exc)).warning(
            "llm_group_failed"
        )

    def _client(self, group: ModelGroup) -> LLMClient:
        if group.name not in self._clients:
            self._clients[group.name] = self._create(group)
        return self._clients[group.name]


def _for_group(request: LLMRequest, group: ModelGroup, tries: int) -> LLMRequest:
    """Return the request as the group can take it, its tries counted on after those of earlier groups."""
    on_delta, messages = request.on_delta, request.messages
    if not group.vision:
        messages = tuple(message.without_images() for message in messages)
    if on_delta is None or not tries:
        return replace(request, messages=messages)
    return replace(request, messages=messages, on_delta=lambda number, text: on_delta(tries + number, text))


def _joined(failures: list[LLMError], failed: list[FailedGroup], tries: int) -> LLMError:
    """Return one error for all groups, of the kind of the first, which the chat or the settings chose."""
    first = failures[0]
    if len(failures) > 1:
        first = type(first)("; ".join(f"group {one.group}: {one.error}" for one in failed))
    first.tries = tries
    first.is_too_long = any(failure.is_too_long for failure in failures)
    return first


def create_client(settings: LLMSettings) -> LLMClient:
    """Build the configured client; a script has priority over an endpoint.

    Raises:
        LLMError: neither is configured, or the script cannot be read.
    """
    if settings.script is not None:
        return ScriptedClient(
            settings.script,
            record=settings.record,
            input_price=settings.input_price_per_million,
            output_price=settings.output_price_per_million,
        )
    if settings.base_url and settings.model:
        # Imported here because the package takes 0.3 s to import and a script does not need it.
        from nekro.agent.llm.endpoint_client import EndpointClient

        return EndpointClient(settings)
    if settings.base_url:
        raise LLMError(f"NEKRO_LLM__BASE_URL is {settings.base_url}, but NEKRO_LLM__MODEL names no model")
    raise LLMError(
        "no language model is configured: set NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL (and "
        "NEKRO_LLM__API_KEY where the endpoint wants one), or NEKRO_LLM__SCRIPT to replay answers "
        "from a YAML file"
    )


def create_models(settings: Settings) -> LLMClient:
    """Build the client of all model groups; a script answers for every group.

    Raises:
        LLMError: no model is configured for the group ``default``, or the script cannot be read.
    """
    if settings.llm.script is not None:
        return create_client(settings.llm)
    return ModelRouter(settings, lambda group: _group_client(settings.llm, group))


def _group_client(llm: LLMSettings, group: ModelGroup) -> LLMClient:
    if group.name == DEFAULT_GROUP:
        return create_client(llm)
    # Imported here as above.
    from nekro.agent.llm.endpoint_client import EndpointClient

    return EndpointClient(endpoint_of(llm, group), group=group.name)


def endpoint_of(llm: LLMSettings, group: ModelGroup) -> LLMSettings:
    """Return the settings of a group's endpoint; what groups do not set is as in ``NEKRO_LLM__…``."""
    return llm.model_copy(
        update={
            "base_url": group.base_url,
            "protocol": group.protocol,
            "api_key": group.api_key,
            "model": group.model,
            "max_output_tokens": None,
            "parameters": json.dumps(dict(group.parameters)),
            "proxy": group.proxy,
            "first_token_timeout_seconds": group.first_token_seconds,
            "idle_timeout_seconds": group.idle_seconds,
            "input_price_per_million": group.input_price,
            "cached_input_price_per_million": group.cached_input_price,
            "output_price_per_million": group.output_price,
        }
    )
