"""The order of calls that wait in a queue of Redis: plugins take turns, and so do the chats that call one.

A queue's own list, which kombu and workers read, has the message that is next. The messages behind it lie in
a list per plugin and chat (keys: ``broker_config.keys``), and who takes a message from the queue's list moves
the next one there. So a plugin or chat with thousands of waiting calls delays a call of another one by a
message or two. Messages that kombu publishes or that are requeued go to the queue's list directly.

Workers of 0.2.0 move nothing. A publisher uses the lists while a worker that does has reached Redis recently
(``LOOK`` in ``nekro.broker.delivery.transport``); otherwise the queue is served in order.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

__all__ = ["FAIR_PUT", "FAIR_TAKE", "owners_of"]

#: Lua function ``fair_put(queue, plugin, chat, message)``: adds a message behind a queue's own list, which
#: kombu and workers read, to the list of its plugin and chat (keys: ``broker_config.keys``). While messages
#: lie there, the queue's list is not empty, or no worker would wake: who takes from it calls ``fair_move``.
FAIR_PUT: Final = """
local function fair_put(queue, plugin, chat, message)
    local plugins = queue .. ':fair'
    local chats = plugins .. ':' .. plugin
    local messages = chats .. ':' .. chat
    if redis.call('RPUSH', messages, message) == 1 and redis.call('RPUSH', chats, chat) == 1 then
        redis.call('RPUSH', plugins, plugin)
    end
    redis.call('INCR', queue .. ':fair_length')
end
"""

#: Lua functions ``fair_take(queue)``: removes and returns the next of these messages, nil if there is none;
#: passes over plugins and chats whose lists are gone. ``fair_move(queue)``: moves it to the queue's list.
FAIR_TAKE: Final = """
local function fair_take(queue)
    local plugins = queue .. ':fair'
    while true do
        local plugin = redis.call('LPOP', plugins)
        if not plugin then
            redis.call('DEL', queue .. ':fair_length')
            return nil
        end
        local chats = plugins .. ':' .. plugin
        local chat, message = redis.call('LPOP', chats), nil
        if chat then
            local messages = chats .. ':' .. chat
            message = redis.call('LPOP', messages)
            if redis.call('EXISTS', messages) == 1 then redis.call('RPUSH', chats, chat) end
            if redis.call('EXISTS', chats) == 1 then redis.call('RPUSH', plugins, plugin) end
        end
        if message then
            local length = queue .. ':fair_length'
            if redis.call('DECR', length) <= 0 then redis.call('DEL', length) end
            return message
        end
    end
end
local function fair_move(queue)
    local message = fair_take(queue)
    if message then redis.call('LPUSH', queue, message) end
end
"""


def owners_of(method: str, chat_key: str) -> tuple[str, str]:
    """Return the names of the plugin and the chat of a call for ``FAIR_PUT``; they have one length."""
    plugin = ".".join(method.split(".", 2)[:2])
    return _name_of(plugin), _name_of(chat_key)


@lru_cache(maxsize=1000)
def _name_of(owner: str) -> str:
    return hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
