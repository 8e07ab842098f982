"""Connects the SDK's runtime to this process's services: its messages and records are rows.

A message of a plugin is a row in the chat's history, then an event for the subscribers that deliver it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from nekro.app.chats.writer import TimerFirings, append_message, request_round
from nekro.app.model_meters import PluginModels
from nekro.plugins.configuration import core_config, package_policy
from nekro.wire.invocation import new_id
from nekro_agent import runtime
from nekro_agent.execution.current import cause_turn_id, current_account, current_call, effect_id
from nekro_agent.files import staging
from nekro_agent.ports import ChatInfo, IncomingMessage, MessageKind, OutgoingMessage, require_lengths
from nekro_agent.records import PluginValue, PresetInfo, StoredMessage, UserInfo
from nekro_agent.runtime import DownloadPolicy, StorePolicy, UploadPolicy
from storage.driver.errors import outlasting
from storage.engine import Database
from storage.kv import SqlKeyValueStore
from storage.repositories.messages import Message, NewMessage
from storage.repositories.rounds import Round, RoundRequest
from storage.states import TriggerKind
from storage.timer_services import SqlCronJobs, SqlTimers
from storage.transaction import Transaction
from workers.jobs.downloads import SqlDownloads
from workers.jobs.service import SqlJobs

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher
    from nekro.app.services import Services
    from nekro.plugins.hooks import PluginHost

__all__ = [
    "SqlMessages",
    "SqlRecords",
    "runtime_of",
]


class SqlMessages:
    """``nekro_agent.ports.Messages`` on the database and ``agent.events``."""

    def __init__(self, database: Database, publisher: EventPublisher, *, debounce_seconds: float = 0) -> None:
        self._database = database
        self._publisher = publisher
        self._debounce_seconds = debounce_seconds

    async def send(self, message: OutgoingMessage) -> str:
        """Record a message of the agent and announce it, unless its id exists; returns its id.

        Raises:
            InvalidValueError: it is too long.
        """
        data = {
            "file_path": message.file_path,
            "file_name": message.file_name,
            "file_kind": message.file_kind,
            "media_type": message.file_media_type,
            "size_bytes": message.file_size,
            "modified_ns": message.file_modified_ns,
            "reply_to": message.reply_to,
            "hidden": None if message.record else True,
        }
        call = current_call(message.chat_key)
        new = NewMessage(
            id=message.id or new_id(),
            chat_key=message.chat_key,
            kind=MessageKind.ASSISTANT,
            text=message.text,
            data={name: value for name, value in data.items() if value is not None} or None,
            call_id=message.call_id,
            round_id=call.round_id if call else None,
            turn_id=call.turn_id if call else None,
            plugin_key=message.plugin_key,
        )
        return (await self._append(new, more_bytes=message.file_size or 0)).id

    async def push_system(
        self,
        chat_key: str,
        text: str,
        *,
        trigger_agent: bool,
        call_id: str | None,
        message_id: str | None = None,
    ) -> str:
        """Record a system message; with ``trigger_agent`` a round is requested in the same transaction.

        A message from a call continues the turn of the running round, so an agent that triggers
        itself in each round meets the turn's limits.
        """
        call = current_call(chat_key)
        new = NewMessage(
            id=message_id or new_id(),
            chat_key=chat_key,
            kind=MessageKind.SYSTEM,
            text=text,
            call_id=call_id,
            round_id=call.round_id if call else None,
            turn_id=call.turn_id if call else None,
        )
        return (await self._append(new, wake=trigger_agent)).id

    async def wake(self, chat_key: str) -> None:
        """Request a round of the chat's agent without a message."""
        trigger_id = effect_id("wake", chat_key)

        @outlasting
        async def request() -> None:
            async with self._database.begin() as transaction:
                await self._request_round(transaction, chat_key, TriggerKind.MANUAL, trigger_id, None)

        await staging.commit()
        await request()

    @outlasting
    async def _append(self, new: NewMessage, *, wake: bool = False, more_bytes: int = 0) -> Message:
        require_lengths(new.text, data=new.data)
        await staging.commit()
        async with self._database.begin() as transaction:
            row = await append_message(
                transaction, self._publisher, new, account_id=current_account(), more_bytes=more_bytes
            )
            if wake:
                cause = None
                if row.call_id is not None:
                    cause = await transaction.rounds.find_running(row.chat_key)
                await self._request_round(transaction, row.chat_key, TriggerKind.MESSAGE, row.id, cause, row)
        return row

    async def _request_round(
        self,
        transaction: Transaction,
        chat_key: str,
        kind: TriggerKind,
        trigger_id: str,
        cause: Round | None,
        message: Message | None = None,
    ) -> None:
        request = RoundRequest(
            chat_key=chat_key,
            trigger_kind=kind,
            trigger_id=trigger_id,
            turn_id=cause.turn_id if cause else None,
            cause_turn_id=(message.turn_id if message else None) or cause_turn_id(chat_key),
            account_id=current_account(),
            number=cause.number + 1 if cause else 1,
            user_id=cause.user_id if cause else None,
            delay_seconds=self._debounce_seconds,
        )
        await request_round(transaction, self._publisher, request, message=message)


class SqlRecords:
    """Implements ``nekro_agent.records.Records``."""

    def __init__(self, database: Database, publisher: EventPublisher) -> None:
        self._database = database
        self._publisher = publisher

    @outlasting
    async def messages(
        self, *, chat_key: str | None, since: datetime | None, limit: int
    ) -> list[StoredMessage]:
        """Return the newest messages, newest first; of all chats when ``chat_key`` is None."""
        async with self._database.read() as transaction:
            return await transaction.records.messages(chat_key=chat_key, since=since, limit=limit)

    async def add_message(
        self,
        chat_key: str,
        *,
        kind: MessageKind,
        text: str,
        message_id: str | None = None,
        sender_id: str | None = None,
        sender_name: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> StoredMessage:
        """Append a message and announce it.

        Raises:
            InvalidValueError: it is too long.
        """
        new = NewMessage(
            chat_key=chat_key,
            kind=kind,
            text=text,
            id=message_id or effect_id("record", chat_key),
            sender_id=sender_id,
            sender_name=sender_name,
            data=dict(data) if data else None,
        )
        require_lengths(text, sender_id=sender_id, sender_name=sender_name, data=data)

        @outlasting
        async def append() -> Message:
            async with self._database.begin() as transaction:
                return await append_message(transaction, self._publisher, new, account_id=current_account())

        await staging.commit()
        row = await append()
        return StoredMessage(
            sequence=row.sequence,
            id=row.id,
            chat_key=row.chat_key,
            kind=row.kind,
            sender_id=row.sender_id,
            sender_name=row.sender_name,
            text=row.text,
            created_at=row.created_at,
            data=row.data,
        )

    @outlasting
    async def change_message(self, message_id: str, changes: Mapping[str, Any]) -> bool:
        """Change a message; False when there is none.

        Raises:
            InvalidValueError: its text is too long.
        """
        require_lengths(str(changes.get("text") or ""))
        async with self._database.begin() as transaction:
            return await transaction.records.change_message(message_id, changes)

    @outlasting
    async def delete_message(self, message_id: str) -> bool:
        """Delete a message; False when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.delete_message(message_id)

    @outlasting
    async def chats(self, *, chat_key: str | None, limit: int) -> list[ChatInfo]:
        """Return chats, newest first; only that one when ``chat_key`` is given."""
        async with self._database.read() as transaction:
            return await transaction.records.chats(chat_key=chat_key, limit=limit)

    @outlasting
    async def change_chat(self, chat_key: str, changes: Mapping[str, Any]) -> ChatInfo:
        """Change a chat, which is created when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.change_chat(chat_key, changes)

    @outlasting
    async def reset_chat(self, chat_key: str) -> None:
        """Begin a new conversation."""
        async with self._database.begin() as transaction:
            await transaction.chats.reset(chat_key)

    @outlasting
    async def plugin_values(
        self, *, plugin_key: str | None, store_key: str | None, chat_key: str | None, limit: int
    ) -> list[PluginValue]:
        """Return stored values; a filter that is None matches everything."""
        async with self._database.read() as transaction:
            return await transaction.records.plugin_values(
                plugin_key=plugin_key, store_key=store_key, chat_key=chat_key, limit=limit
            )

    @outlasting
    async def users(self, *, platform_userid: str | None, limit: int) -> list[UserInfo]:
        """Return users, oldest first; only those of that platform id when it is given."""
        async with self._database.read() as transaction:
            return await transaction.records.users(platform_userid=platform_userid, limit=limit)

    @outlasting
    async def change_user(
        self, adapter_key: str, platform_userid: str, changes: Mapping[str, Any]
    ) -> UserInfo:
        """Change a user, who is added when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.change_user(adapter_key, platform_userid, changes)

    @outlasting
    async def delete_user(self, user_id: int) -> bool:
        """Delete a user; False when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.delete_user(user_id)

    @outlasting
    async def presets(self, *, preset_id: int | None, limit: int) -> list[PresetInfo]:
        """Return presets, oldest first; only that one when ``preset_id`` is given."""
        async with self._database.read() as transaction:
            return await transaction.records.presets(preset_id=preset_id, limit=limit)

    async def add_preset(self, values: Mapping[str, Any]) -> PresetInfo:
        """Add a preset; a call that is repeated because its worker died adds none twice."""
        once_key = effect_id("preset")

        @outlasting
        async def add() -> PresetInfo:
            async with self._database.begin() as transaction:
                return await transaction.records.add_preset(values, once_key=once_key)

        return await add()

    @outlasting
    async def change_preset(self, preset_id: int, changes: Mapping[str, Any]) -> bool:
        """Change a preset; False when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.change_preset(preset_id, changes)

    @outlasting
    async def delete_preset(self, preset_id: int) -> bool:
        """Delete a preset; False when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.delete_preset(preset_id)


class _Intake:
    """The intake of messages; built, and imported with the agent, at the first message of a plugin."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def receive(self, message: IncomingMessage) -> str | None:
        """As ``nekro_agent.ports.Intake``."""
        await staging.commit()
        return await self._services.intake.receive(message)


def runtime_of(services: Services, host: PluginHost) -> runtime.Runtime:
    """Return the SDK's runtime with this process's implementations of its ports; ``host`` has the plugins."""
    settings = services.settings
    firings = TimerFirings(services.publisher, debounce_seconds=settings.agent.debounce_seconds)
    return runtime.Runtime(
        data_dir=settings.data_dir,
        store=SqlKeyValueStore(services.database, settings.store),
        messages=SqlMessages(
            services.database, services.publisher, debounce_seconds=settings.agent.debounce_seconds
        ),
        areas=services.areas,
        timers=SqlTimers(services.database),
        cron_jobs=SqlCronJobs(services.database, on_fire=firings.fire),
        jobs=SqlJobs(services.database, services.background, services.publisher),
        records=SqlRecords(services.database, services.publisher),
        intake=_Intake(services),
        download_claims=SqlDownloads(
            services.leases,
            services.background,
            data_dir=settings.data_dir,
            owner=services.node,
            lease_seconds=settings.agent.lease_seconds,
            files=(lambda: services.files) if settings.files.in_store else None,
        ),
        hooks=host,
        store_policy=StorePolicy(max_value_bytes=settings.store.max_value_bytes),
        downloads=DownloadPolicy(
            max_bytes=settings.downloads.max_bytes,
            timeout_seconds=settings.downloads.timeout_seconds,
            allow_private=tuple(settings.downloads.allow_private),
            connections=settings.downloads.connections,
        ),
        packages=package_policy(settings),
        uploads=UploadPolicy(chat_bytes=settings.uploads.chat_bytes, chat_names=settings.uploads.chat_names),
        core=core_config(settings),
        model_budget=PluginModels(services.spending, settings),
    )
