"""``plugin.store``: text values of a plugin, per chat, per user, per both, or for the whole plugin."""

from __future__ import annotations

from typing import Final, Literal

from nekro_agent import runtime
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError
from nekro_agent.runtime import StorePolicy

__all__ = ["MAX_KEY_CHARS", "PluginStore"]

_log = get_sub_logger("store")
#: Longest chat key, user key or store key, in characters; each becomes part of a digest and a log line.
MAX_KEY_CHARS: Final = 1024
#: A value of this size or more is logged as too large for a key-value store.
_LARGE_BYTES: Final = 1 << 20


class PluginStore:
    """Key-value store of one plugin.

    ``chat_key`` and ``user_key`` choose the scope; ``""`` means "none": without both it is the
    plugin's global scope, and both together are a scope of their own. ``None`` as chat or user key
    means "unknown" (``_ctx.from_user_id`` of a call that no user triggered): reading returns None,
    and writing is an error rather than a write to the global scope.
    """

    def __init__(self, plugin_key: str) -> None:
        self._plugin_key = plugin_key

    async def get(
        self, chat_key: str | None = "", user_key: str | None = "", store_key: str = ""
    ) -> str | None:
        """Return the value, or None if there is none.

        Raises:
            InvalidValueError: a key is too long, not a string, or ``store_key`` is empty.
        """
        if chat_key is None or user_key is None:
            return None
        bound = runtime.current()
        scope = _checked_keys(chat_key, user_key, store_key)
        return await bound.store.get(self._plugin_key, **scope)

    async def set(
        self, chat_key: str | None = "", user_key: str | None = "", store_key: str = "", value: str = ""
    ) -> Literal[0, 1]:
        """Store a value durably; numbers and booleans are stored as their text, with a warning.

        Returns:
            0 if the key is new, 1 if its value was replaced.

        Raises:
            InvalidValueError: a key or the value has a wrong type or is too large, or a scope is
                unknown (``user_key=None``).
        """
        for name, key in (("chat_key", chat_key), ("user_key", user_key)):
            if key is None:
                raise InvalidValueError(
                    f"store.set: {name} is None, so the scope is unknown (no {name.split('_')[0]} triggered "
                    f'this call); nothing was written. Pass a key, or "" to mean another scope on purpose'
                )
        bound = runtime.current()
        scope = _checked_keys(chat_key, user_key, store_key)
        text = _checked_value(self._plugin_key, store_key, value, bound.store_policy)
        return 0 if await bound.store.set(self._plugin_key, **scope, value=text) else 1

    async def delete(
        self, chat_key: str | None = "", user_key: str | None = "", store_key: str = ""
    ) -> Literal[0, 1]:
        """Delete a value.

        Returns:
            0 if a value was deleted, 1 if there was none.

        Raises:
            InvalidValueError: as for :meth:`get`.
        """
        if chat_key is None or user_key is None:
            return 1
        bound = runtime.current()
        scope = _checked_keys(chat_key, user_key, store_key)
        return 0 if await bound.store.delete(self._plugin_key, **scope) else 1


def _checked_keys(chat_key: object, user_key: object, store_key: object) -> dict[str, str]:
    keys = {"chat_key": chat_key, "user_key": user_key, "store_key": store_key}
    checked: dict[str, str] = {}
    for name, key in keys.items():
        if not isinstance(key, str):
            raise InvalidValueError(f"store: {name} must be a string, not {type(key).__name__}")
        if len(key) > MAX_KEY_CHARS:
            raise InvalidValueError(f"store: {name} has {len(key)} characters, the limit is {MAX_KEY_CHARS}")
        checked[name] = key
    if not checked["store_key"]:
        raise InvalidValueError('store: store_key is empty; name the value, for example store_key="settings"')
    return checked


def _checked_value(plugin_key: str, store_key: str, value: object, policy: StorePolicy) -> str:
    if isinstance(value, bool | int | float):
        log = _log.bind(plugin=plugin_key, store_key=store_key, type=type(value).__name__)
        log.warning("store_value_converted_to_text")
        value = str(value)
    if not isinstance(value, str):
        raise InvalidValueError(
            f"store.set: value of {store_key!r} must be a string, not {type(value).__name__}; "
            "use json.dumps(…) or model_dump_json()"
        )
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > policy.max_value_bytes:
        raise InvalidValueError(
            f"store.set: value of {store_key!r} has {size} bytes, the limit is {policy.max_value_bytes} "
            "for values; keep large data in plugin.get_plugin_data_dir()"
        )
    if size >= _LARGE_BYTES:
        _log.bind(
            plugin=plugin_key,
            store_key=store_key,
            bytes=size,
            fix="keep large data in plugin.get_plugin_data_dir()",
        ).warning("store_value_large")
    return value
