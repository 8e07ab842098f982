"""Fits the pictures of a prompt into its limits: small, counted, and named where they are not shown."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace

from broker_config.settings import AgentSettings
from nekro.agent.model import ImagePart, Part, PromptMessage, TextPart, join_parts
from nekro.agent.multimodal import image_data
from nekro.agent.pictures.decoder import DecodeLimits, PictureDecoder, UnshownPicture
from nekro.agent.room import LOW_SIDE, MOST_TOKENS, tokens_of_image

__all__ = ["PromptPictures"]


@dataclass(kw_only=True)
class _Budget:
    """What the pictures of one prompt may still use."""

    images: int
    bytes: int
    tokens: int

    def take(self, *, size: int, tokens: int) -> str | None:
        """Count a picture; return the limit that it would exceed, and then count nothing."""
        if self.images < 1:
            return "number of images"
        if size > self.bytes:
            return "bytes of images"
        if tokens > self.tokens:
            return "tokens of images"
        self.images, self.bytes, self.tokens = self.images - 1, self.bytes - size, self.tokens - tokens
        return None


class PromptPictures:
    """Makes the pictures of prompts small; one instance serves all rounds of a process."""

    def __init__(self, agent: AgentSettings) -> None:
        self._agent = agent
        self.decoder = PictureDecoder()

    async def fit(
        self, messages: Sequence[PromptMessage], *, sees: bool, detail: str | None, most_tokens: int
    ) -> tuple[PromptMessage, ...]:
        """Return the messages with pictures that an endpoint accepts, the newest ones if not all fit.

        A picture that is not shown becomes a sentence that says why. Pictures at http(s) URLs, which the
        endpoint fetches, count as the largest.

        Args:
            sees: whether a model of the chat sees images.
            detail: ``low``, ``high`` or None (``auto``) for pictures that state none.
            most_tokens: limit besides that of the settings, by the model's context.
        """
        if not any(message.images for message in messages):
            return tuple(messages)
        if not sees:
            return tuple(message.without_images() for message in messages)
        budget = _Budget(
            images=self._agent.prompt_images,
            bytes=self._agent.prompt_image_bytes,
            tokens=min(self._agent.prompt_image_tokens, most_tokens),
        )
        fitted: list[PromptMessage] = []
        for message in reversed(messages):
            parts: list[Part] = []
            for part in reversed(message.parts):
                shown = [part] if isinstance(part, TextPart) else await self._fit(part, budget, detail)
                parts += reversed(shown)
            fitted.append(replace(message, parts=join_parts(reversed(parts))) if message.images else message)
        return tuple(reversed(fitted))

    async def _fit(self, part: ImagePart, budget: _Budget, detail: str | None) -> list[Part]:
        part = replace(part, detail=part.detail or detail)
        if not part.url.startswith("data:"):
            tokens = tokens_of_image(1, 1, "low") if part.detail == "low" else MOST_TOKENS
            exceeded = budget.take(size=0, tokens=tokens)
            return [part] if exceeded is None else [_left_out(f"an image; {_limit(exceeded)}")]
        if budget.images < 1:
            return [_left_out(f"an image; {_limit('number of images')}")]
        decoded = await asyncio.to_thread(image_data, part.url)
        if decoded is None:
            return [_left_out("an image that cannot be read")]
        picture = await self.decoder.decode(decoded[1], self.limits(part.detail))
        if isinstance(picture, UnshownPicture):
            return [_left_out(f"an image of {len(decoded[1])} bytes, because {picture.reason}")]
        size = f"{picture.was[0]} x {picture.was[1]} pixels"
        tokens = tokens_of_image(picture.width, picture.height, part.detail)
        exceeded = budget.take(size=len(picture.content), tokens=tokens)
        if exceeded is not None:
            return [_left_out(f"an image of {size}; {_limit(exceeded)}")]
        content = b64encode(picture.content).decode("ascii")
        shown: list[Part] = [replace(part, url=f"data:{picture.media_type};base64,{content}")]
        notes = [f"at {picture.width} x {picture.height} of {size}"] if picture.is_scaled else []
        notes += ["the first frame of an animation"] if picture.is_animated else []
        return [*shown, TextPart(text=f"[shown: {', '.join(notes)}]")] if notes else shown

    def limits(self, detail: str | None) -> DecodeLimits:
        """Return the limits of one picture of a detail; None means ``auto``."""
        side = self._agent.image_side
        return DecodeLimits(
            side=min(side, LOW_SIDE) if detail == "low" else side,
            bytes=self._agent.image_bytes,
            pixels=self._agent.image_pixels,
        )


def _limit(name: str) -> str:
    return f"newer ones use up the {name} of a prompt"


def _left_out(what: str) -> TextPart:
    return TextPart(text=f"[left out: {what}]")
