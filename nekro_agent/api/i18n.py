"""Texts in several languages."""

from __future__ import annotations

from nekro_agent.schemas.i18n import I18nDict, SupportedLang, get_text, i18n_text

__all__ = ["I18nDict", "SupportedLang", "get_text", "i18n_text"]
