"""Texts in several languages."""

from __future__ import annotations

from nekro_agent.schemas.i18n import (
    I18nDict,
    SupportedLang,
    get_system_lang,
    get_text,
    i18n_text,
    resolve_i18n,
    set_system_lang,
    t,
)

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
