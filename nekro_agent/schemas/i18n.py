"""Texts in several languages."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

__all__ = ["I18nDict", "SupportedLang", "get_text", "i18n_text"]

#: Text by language tag, for example ``{"zh-CN": …, "en-US": …}``.
I18nDict: TypeAlias = dict[str, str]


class SupportedLang(StrEnum):
    """Languages of commands and labels."""

    ZH_CN = "zh-CN"
    EN_US = "en-US"


def i18n_text(*, zh_CN: str, en_US: str) -> I18nDict:
    """Return a text in both languages."""
    return {SupportedLang.ZH_CN.value: zh_CN, SupportedLang.EN_US.value: en_US}


def get_text(
    texts: I18nDict | None, default: str = "", lang: SupportedLang | str = SupportedLang.ZH_CN
) -> str:
    """Return the text of a language, else ``default``, else any text."""
    if not texts:
        return default
    return texts.get(str(lang)) or default or next(iter(texts.values()), "")
