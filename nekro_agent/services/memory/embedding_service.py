"""Embeddings of texts by the model group ``text-embedding``."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Final

from nekro_agent.core.config import config
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError, LLMError
from nekro_agent.runtime import ModelConfigGroup, group_variable
from nekro_agent.services.agent.openai import gen_openai_embeddings

__all__ = [
    "EmbeddingService",
    "embed_batch",
    "embed_text",
    "embedding_service",
    "get_memory_embedding_dimension",
    "get_memory_embedding_model_group",
]

_GROUP: Final = "text-embedding"
#: Length of a vector unless the group's parameters state ``dimensions``.
_DIMENSION: Final = 1024

_log = get_sub_logger("embeddings")


def get_memory_embedding_model_group() -> str:
    """Return the name of the model group that embeds texts."""
    return _GROUP


def get_memory_embedding_dimension() -> int:
    """Return the length of a vector: ``dimensions`` of the group's parameters, else 1024."""
    group = config.MODEL_GROUPS.get(_GROUP)
    return _DIMENSION if group is None else _dimension_of(group)


class EmbeddingService:
    """Embeds texts with a model group."""

    def __init__(
        self, model_group: str | None = None, dimension: int | None = None, timeout: float | None = 30
    ) -> None:
        """Choose a group; nothing is asked yet.

        Args:
            model_group: name of the group; None means ``text-embedding``.
            dimension: length of a vector; None leaves it to the group.
            timeout: seconds for one text; None leaves it to the client.
        """
        self.model_group = model_group
        self.dimension = dimension
        self.timeout = timeout

    @property
    def resolved_model_group(self) -> str:
        """Name of the group that is asked."""
        return get_memory_embedding_model_group() if self.model_group is None else self.model_group

    @property
    def resolved_dimension(self) -> int:
        """Length of a vector.

        Raises:
            InvalidValueError: there is no such group.
        """
        return _dimension_of(self._group()) if self.dimension is None else self.dimension

    async def embed_text(self, text: str) -> list[float]:
        """Return the vector of a text.

        Raises:
            InvalidValueError: the text is empty, or there is no such model group.
            LLMError: the endpoint refused or did not answer.
        """
        if not isinstance(text, str) or not text.strip():
            raise InvalidValueError("embed_text: the text is empty")
        group, dimension = self._group(), self.resolved_dimension
        vector = await gen_openai_embeddings(
            model=group.CHAT_MODEL,
            input=text.strip(),
            dimensions=dimension,
            api_key=group.API_KEY,
            base_url=group.BASE_URL,
            proxy_url=group.CHAT_PROXY,
            timeout=self.timeout,
        )
        if len(vector) != dimension:
            variable = group_variable(self.resolved_model_group, "PARAMETERS")
            fix = f'set {variable} to {{"dimensions": {len(vector)}}}'
            _log.bind(expected=dimension, received=len(vector), fix=fix).warning(
                "embedding_dimension_differs"
            )
        return vector

    async def embed_batch(self, texts: Sequence[str], batch_size: int = 10) -> list[list[float] | None]:
        """Return the vector of each text; None for one that could not be embedded, which is logged.

        Args:
            batch_size: texts that are asked for at the same time.

        Raises:
            InvalidValueError: there is no such model group.
        """
        self._group()
        places = asyncio.Semaphore(max(1, batch_size))

        async def embed(text: str) -> list[float] | None:
            async with places:
                try:
                    return await self.embed_text(text)
                except (InvalidValueError, LLMError) as exc:
                    _log.bind(error=str(exc)).warning("text_not_embedded")
                    return None

        return list(await asyncio.gather(*map(embed, texts)))

    async def compute_similarity(self, text1: str, text2: str) -> float:
        """Return the cosine of the angle between two texts' vectors; 0 if one is zero.

        Raises:
            InvalidValueError, LLMError: as for ``embed_text``.
        """
        first, second = await asyncio.gather(self.embed_text(text1), self.embed_text(text2))
        length = math.hypot(*first) * math.hypot(*second)
        return sum(a * b for a, b in zip(first, second, strict=True)) / length if length else 0.0

    def _group(self) -> ModelConfigGroup:
        try:
            return config.get_model_group_info(self.resolved_model_group)
        except KeyError as exc:
            raise InvalidValueError(str(exc.args[0])) from None


embedding_service = EmbeddingService()


async def embed_text(text: str) -> list[float]:
    """Return the vector of a text; see :meth:`EmbeddingService.embed_text`."""
    return await embedding_service.embed_text(text)


async def embed_batch(texts: Sequence[str]) -> list[list[float] | None]:
    """Return the vector of each text; see :meth:`EmbeddingService.embed_batch`."""
    return await embedding_service.embed_batch(texts)


def _dimension_of(group: ModelConfigGroup) -> int:
    stated = json.loads(group.EXTRA_BODY or "{}").get("dimensions")
    return stated if isinstance(stated, int) and stated > 0 else _DIMENSION
