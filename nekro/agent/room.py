"""The room of a prompt: count the tokens of texts, and share those of a model's context between its parts.

A model's own tokenizer counts where it is at hand. Otherwise an estimate goes by the classes of a text's
characters. Its weights were fitted to four tokenizers of current models and err to the high side;
``docs/lab/tokens.md`` has their error. The work per character is a few passes over bytes in C.

tiktoken downloads a table that it does not find. So a table is checked first: it must be in
``TIKTOKEN_CACHE_DIR`` with the content that tiktoken expects, or it is not used."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from loguru import logger

from broker_config.model_groups import ModelGroup
from broker_config.settings import AgentSettings
from nekro.agent.model import ImagePart, PromptMessage

__all__ = [
    "DIRECTORY_VARIABLE",
    "ESTIMATE",
    "LEARNED_SECONDS",
    "LOW_SIDE",
    "MOST_TOKENS",
    "ModelContexts",
    "PromptRoom",
    "TokenCounter",
    "TokenLimits",
    "counter_of",
    "encoding_of",
    "estimate_tokens",
    "features",
    "load_encoder",
    "tokens_of_image",
    "tokens_of_prompt",
]


#: Continuation bytes of UTF-8: the first byte of a character decides its class.
_CONTINUED: Final = bytes(range(0x80, 0xC0))


def _classes() -> bytes:
    table = bytearray(b"p" * 256)
    for name, members in {
        b"a": range(ord("a"), ord("z") + 1),
        b"A": range(ord("A"), ord("Z") + 1),
        b"d": range(ord("0"), ord("9") + 1),
        b"s": b" \t",
        b"n": b"\n\r",
        b"2": range(0xC2, 0xE0),  # Latin with accents, Greek, Cyrillic, Hebrew, Arabic
        b"J": (0xE3,),  # kana and punctuation of Chinese and Japanese
        b"C": range(0xE4, 0xEA),  # Chinese characters
        b"K": range(0xEA, 0xEE),  # Hangul
        b"3": (0xE0, 0xE1, 0xE2, 0xEE, 0xEF),  # other scripts, typographic signs
        b"4": range(0xF0, 0xF5),  # emoji and rare characters
    }.items():
        for byte in members:
            table[byte] = name[0]
    return bytes(table)


_CLASSES: Final = _classes()


def _only(*kept: bytes) -> bytes:
    """Return a table that keeps some classes and turns the others into spaces, for counting runs."""
    members = b"".join(kept)
    return bytes(byte if byte in members else 0x20 for byte in range(256))


_LETTERS: Final = _only(b"aA2")

_DIGITS: Final = _only(b"d")

_SIGNS: Final = _only(b"p")

#: Tokens for each, in the order of ``features``.
_WEIGHTS: Final = {
    "words": 0.432,
    "lower": 0.201,
    "upper": 0.634,
    "camel": 0.755,
    "digits": 1.021,
    "numbers": 0.287,
    "signs": 0.05,
    "sign_runs": 0.612,
    "lines": 1.099,
    "indents": 0.702,
    "spaces": 0.07,
    "accented": 0.307,
    "kana": 0.702,
    "han": 0.769,
    "hangul": 0.924,
    "other": 1.332,
    "emoji": 2.781,
}


def features(text: str) -> dict[str, int]:
    """Return how often each feature occurs in a text."""
    data = text.encode("utf-8", "replace").translate(_CLASSES, _CONTINUED)
    count = data.count
    return {
        "words": len(data.translate(_LETTERS).split()),
        "lower": count(b"a"),
        "upper": count(b"A"),
        "camel": count(b"aA"),
        "digits": count(b"d"),
        "numbers": len(data.translate(_DIGITS).split()),
        "signs": count(b"p"),
        "sign_runs": len(data.translate(_SIGNS).split()),
        "lines": count(b"n"),
        "indents": count(b"ns"),
        "spaces": count(b"ss"),
        "accented": count(b"2"),
        "kana": count(b"J"),
        "han": count(b"C"),
        "hangul": count(b"K"),
        "other": count(b"3"),
        "emoji": count(b"4"),
    }


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has for current models; 0 for an empty one."""
    if not text:
        return 0
    found = features(text)
    return max(1, math.ceil(sum(weight * found[name] for name, weight in _WEIGHTS.items())))


#: tiktoken's own variable: the directory of its tables.
DIRECTORY_VARIABLE: Final = "TIKTOKEN_CACHE_DIR"
#: Name of the file, which is the SHA-1 of the address that it comes from, and SHA-256 of its content.
#: Source: ``tiktoken_ext.openai_public`` and ``tiktoken.load``, version 0.14.
_TABLES: Final = {
    "cl100k_base": (
        "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    "o200k_base": (
        "fb374d419588a4632f3f557e76b4b70aebbca790",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
}
#: Differs from its base in tokens that no text contains.
_SAME_TABLE: Final = {"o200k_harmony": "o200k_base"}


def encoding_of(model: str) -> str | None:
    """Return the tokenizer of a model by the model's name, None if it is not known.

    A name may begin with that of its maker: ``openai/gpt-4o``.
    """
    try:
        from tiktoken.model import encoding_name_for_model
    except ImportError:
        return None
    try:
        name = encoding_name_for_model(model.rpartition("/")[2])
    except KeyError:
        return None
    name = _SAME_TABLE.get(name, name)
    return name if name in _TABLES else None


def load_encoder(encoding: str) -> Callable[[str], Sequence[int]] | None:
    """Return the function that encodes with a table, None if the table is not on this machine."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return None
    file_name, digest = _TABLES[encoding]
    path = Path(directory) / file_name
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
    except OSError as exc:
        logger.bind(path=str(path), error=str(exc)).warning("tokenizer_not_readable")
        return None
    if found != digest:
        logger.bind(path=str(path)).warning("tokenizer_has_other_content")
        return None
    import tiktoken

    return tiktoken.get_encoding(encoding).encode_ordinary


#: Texts whose count is kept, about those of a few prompts. A tokenizer takes 0.2 µs per character or more.
_MOST_KEPT: Final = 1024

_LONGEST_KEPT: Final = 32_768


class TokenCounter:
    """Counts the tokens of texts; thread-safe.

    Args:
        name: the tokenizer, for logs; ``estimate`` if ``is_exact`` is False.
        is_exact: whether ``count`` is a tokenizer, which takes so long that prompts are built on a thread.
    """

    def __init__(self, name: str, count: Callable[[str], int], *, is_exact: bool) -> None:
        self.name = name
        self.is_exact = is_exact
        self._count = count
        # In a turn most texts of a prompt are those of the prompt before.
        self._kept = lru_cache(maxsize=_MOST_KEPT)(count)

    def count(self, text: str) -> int:
        """Return the tokens of a text."""
        return self._kept(text) if len(text) <= _LONGEST_KEPT else self._count(text)


#: Counts for a model whose tokenizer is not known.
ESTIMATE: Final = TokenCounter("estimate", estimate_tokens, is_exact=False)


def counter_of(model: str) -> TokenCounter:
    """Return the counter of a model's texts; the first call for a tokenizer reads its table, which blocks.

    Never opens a connection: without the extra ``tokens``, or without the tokenizer's table in
    ``TIKTOKEN_CACHE_DIR``, it is ``ESTIMATE``.
    """
    encoding = encoding_of(model)
    return ESTIMATE if encoding is None else _exact(encoding)


@cache
def _exact(encoding: str) -> TokenCounter:
    encode = load_encoder(encoding)
    if encode is None:
        return ESTIMATE
    logger.bind(encoding=encoding).debug("tokenizer_loaded")
    return TokenCounter(encoding, lambda text: len(encode(text)), is_exact=True)


#: Models scale an image of detail ``low`` to this longest side, in pixels.
LOW_SIDE: Final = 512

_BASE: Final = 85

_PER_TILE: Final = 170

_TILE: Final = 512

_LONGEST_SIDE: Final = 2048

_SHORTEST_SIDE: Final = 768
#: Most tokens of one image: 2048 by 768 pixels are 4 by 2 tiles.
MOST_TOKENS: Final = _BASE + 8 * _PER_TILE


def tokens_of_image(width: int, height: int, detail: str | None = None) -> int:
    """Estimate the input tokens of an image; models of other makers count differently.

    Args:
        width, height: pixels, >= 1.
        detail: ``low``, ``high`` or ``auto``; None and ``auto`` count as ``high``.

    Source: https://platform.openai.com/docs/guides/images-vision, models that count tiles of 512 pixels.

    >>> tokens_of_image(1024, 1024), tokens_of_image(2048, 4096), tokens_of_image(4096, 8192, "low")
    (765, 1105, 85)
    """
    if detail == "low":
        return _BASE
    scale = min(1.0, _LONGEST_SIDE / max(width, height))
    scale = min(scale, _SHORTEST_SIDE / min(width, height))
    across, down = (max(1, math.ceil(round(side * scale) / _TILE)) for side in (width, height))
    return _BASE + _PER_TILE * across * down


#: Tokens that endpoints add to each message, for its role and its ends.
_PER_MESSAGE: Final = 4


@dataclass(frozen=True, kw_only=True)
class TokenLimits:
    """Most tokens of a prompt and of its parts."""

    prompt: int
    #: The list of plugins and methods; 0 means no limit of its own.
    catalogue: int
    history: int
    #: One result of a method, one output of a program, or what one plugin adds to prompts.
    observation: int
    #: One answer of the model in an earlier round.
    answer: int

    @classmethod
    def of(cls, settings: AgentSettings, *, context: int | None, longest: int | None = None) -> TokenLimits:
        """Return the limits for a model.

        Args:
            context: tokens of the model's context, its answer included; None if it is not known.
            longest: most tokens of a prompt, as learned from the endpoint; None if nothing was.
        """
        prompt = settings.prompt_tokens
        if context is not None:
            prompt = min(prompt, context - min(settings.answer_tokens, context // 2))
        if longest is not None:
            prompt = min(prompt, longest)
        return cls(
            prompt=prompt,
            catalogue=min(settings.catalogue_tokens, prompt * 2 // 5),
            history=min(settings.history_tokens, prompt // 4),
            observation=min(settings.observation_tokens, prompt // 8),
            answer=prompt // 4,
        )

    @property
    def images(self) -> int:
        """All images together."""
        return self.prompt // 4

    @property
    def message(self) -> int:
        """One message of the history."""
        return self.history // 5

    @property
    def summary(self) -> int:
        """The summary of older messages, which is a part of the history."""
        return self.history // 4

    def lowered(self) -> TokenLimits:
        """Return the limits of the next try, if the parts together are too long."""
        return TokenLimits(
            prompt=self.prompt,
            catalogue=self.catalogue // 2 if self.catalogue else self.prompt * 2 // 5,
            history=self.history // 2,
            observation=self.observation // 2,
            answer=self.answer // 2,
        )


def tokens_of_prompt(messages: Iterable[PromptMessage]) -> int:
    """Estimate the tokens of messages; images count as the largest."""
    texts = images = 0
    for message in messages:
        texts += _PER_MESSAGE + ESTIMATE.count(message.text)
        images += sum(isinstance(part, ImagePart) for part in message.parts)
    return texts + images * MOST_TOKENS


@dataclass(frozen=True, kw_only=True)
class PromptRoom:
    """The limits of one prompt, and the counter of its model."""

    limits: TokenLimits
    counter: TokenCounter = ESTIMATE

    def tokens_of(self, messages: Iterable[PromptMessage]) -> int:
        """Return the tokens of messages; images count as the largest, together no more than they may have."""
        texts = images = 0
        for message in messages:
            texts += _PER_MESSAGE + self.counter.count(message.text)
            images += sum(isinstance(part, ImagePart) for part in message.parts)
        return texts + min(images * MOST_TOKENS, self.limits.images)


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
        limits = TokenLimits.of(
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
