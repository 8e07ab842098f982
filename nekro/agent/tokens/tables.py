"""The tables of tiktoken on this machine.

tiktoken downloads a table that it does not find. So a table is checked first: it must be in
``TIKTOKEN_CACHE_DIR`` with the content that tiktoken expects, or it is not used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from loguru import logger

__all__ = ["DIRECTORY_VARIABLE", "encoding_of", "load_encoder"]

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
