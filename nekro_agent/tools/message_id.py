"""Ids of messages in the forms that models write."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["normalize_ref_msg_id"]

#: Names that models give to an id: ``msg_id``, ``message id``, ``ref-msg-id``, ``reply_msg_id``, ``消息ID``.
_NAME: Final = r"(?:(?:(?:ref|reply)[\s_-]*)?(?:msg|message)[\s_-]*id|(?:引用)?消息\s*(?:id|编号))"
_VALUE: Final = r"""(?:"([^"\n]+)"|'([^'\n]+)'|`([^`\n]+)`|([^\s,，;；"'`)\]】）>}]+))"""
_REPLY_CODE: Final = re.compile(rf"CQ\s*:\s*reply\s*,[^\]\n]*?\bid\s*=\s*{_VALUE}", re.IGNORECASE)
_NAMED: Final = re.compile(rf"(?<![\w-])[\"'`]?{_NAME}[\"'`]?\s*[:=：]\s*{_VALUE}", re.IGNORECASE)
_SHORT: Final = re.compile(rf"^[\"'`]?(?:reply[\s_-]*)?id[\"'`]?\s*[:=：]\s*{_VALUE}\s*$", re.IGNORECASE)
_PREFIX: Final = re.compile(rf"^(?:{_NAME}|(?:reply[\s_-]*)?id)\s*[:=：]\s*", re.IGNORECASE)
_NUMBER: Final = re.compile(r"^[(（\[【<]\s*(\d+)\s*[)）\]】>]$")
#: A longer text is no id. The expressions and the removal of brackets take quadratic time.
_MOST_CHARS: Final = 1000
_PAIRS: Final = ("()", "（）", "[]", "【】", "<>", "{}", '""', "''", "``")


def normalize_ref_msg_id(ref_msg_id: object | None) -> str | None:
    """Return the id of a message from what a model passed as one; None if it is empty.

    ``msg_id:123``, ``(message_id="123")``, ``[CQ:reply,id=123]`` and ``[123]`` are ``123``. Any other text is
    returned without surrounding spaces.
    """
    text = "" if ref_msg_id is None else str(ref_msg_id).strip()
    if len(text) > _MOST_CHARS:
        return text
    for pattern in (_REPLY_CODE, _NAMED, _SHORT):
        found = pattern.search(text)
        if found:
            value = next(group for group in found.groups() if group is not None)
            return _unwrapped(value) or None
    number = _NUMBER.match(text)
    return number[1] if number else text or None


def _unwrapped(value: str) -> str:
    """Remove brackets, quotes and further names around a value, however they are nested."""
    while True:
        text = value.strip()
        if len(text) > 1 and text[0] + text[-1] in _PAIRS:
            text = text[1:-1]
        text = _PREFIX.sub("", text, count=1).strip()
        if text == value:
            return text
        value = text
