"""Texts in several languages, and the language of the system."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

from nekro_agent.errors import InvalidValueError

__all__ = [
    "I18nDict",
    "SupportedLang",
    "get_system_lang",
    "get_text",
    "i18n_text",
    "resolve_i18n",
    "set_system_lang",
    "t",
]

#: Text by language tag, for example ``{"zh-CN": …, "en-US": …}``.
I18nDict: TypeAlias = dict[str, str]


class SupportedLang(StrEnum):
    """Languages of commands and labels."""

    ZH_CN = "zh-CN"
    EN_US = "en-US"

    @classmethod
    def from_accept_language(cls, accept_lang: str) -> SupportedLang:
        """Return the supported language that a header ``Accept-Language`` prefers; else ZH_CN."""
        best, best_quality = cls.ZH_CN, 0.0
        for entry in (accept_lang or "").split(","):
            tag, *parameters = (part.strip().lower() for part in entry.split(";"))
            quality = _quality(parameters)
            found = next(
                (lang for lang in cls if lang.lower()[:2] == tag.replace("_", "-").split("-")[0]), None
            )
            if found is not None and quality > best_quality:
                best, best_quality = found, quality
        return best


#: The language of this process, which ``set_system_lang`` sets.
_system_lang = SupportedLang.ZH_CN


def i18n_text(*, zh_CN: str, en_US: str) -> I18nDict:
    """Return a text in both languages."""
    return {SupportedLang.ZH_CN.value: zh_CN, SupportedLang.EN_US.value: en_US}


def get_text(
    i18n_dict: Mapping[str, str] | None, default: str = "", lang: SupportedLang | str = SupportedLang.ZH_CN
) -> str:
    """Return the text of a language; ``default`` if there is none."""
    return (i18n_dict or {}).get(str(lang), default)


def get_system_lang() -> SupportedLang:
    """Return the language of this process; ZH_CN unless a plugin has set another one."""
    return _system_lang


def set_system_lang(lang: SupportedLang | str) -> None:
    """Set the language of this process, for every plugin in it.

    Raises:
        InvalidValueError: the language is not supported.
    """
    global _system_lang
    try:
        _system_lang = SupportedLang(lang)
    except ValueError:
        known = ", ".join(SupportedLang)
        raise InvalidValueError(
            f"set_system_lang: {lang!r} is not supported; choose one of {known}"
        ) from None


def resolve_i18n(text: str | Mapping[str, str] | None, lang: SupportedLang | str | None = None) -> str:
    """Return a text, or that of several in a language, else in any language.

    Args:
        lang: None means the language of the system.
    """
    if not isinstance(text, Mapping):
        return "" if text is None else str(text)
    return get_text(text, "", lang or _system_lang) or next(iter(text.values()), "")


def t(lang: SupportedLang | str | None = None, *, zh_CN: str, en_US: str) -> str:
    """Return the text of a language; None means the language of the system."""
    return resolve_i18n(i18n_text(zh_CN=zh_CN, en_US=en_US), lang)


def _quality(parameters: list[str]) -> float:
    """Return the number after ``q=``, from 0 to 1; 1 without one, 0 if it is no number."""
    text = next((one.removeprefix("q=") for one in parameters if one.startswith("q=")), "1")
    try:
        return float(text)
    except ValueError:
        return 0.0
