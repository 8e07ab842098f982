"""Connects the SDK's runtime to the services of this process."""

from __future__ import annotations

from nekro.app.budgets.plugin_models import PluginModels
from nekro.app.chats.messages import SqlMessages
from nekro.app.chats.records import SqlRecords
from nekro.app.parts import Parts
from nekro.plugins.policies import core_config, package_policy
from nekro_agent import runtime
from nekro_agent.policies import DownloadPolicy, StorePolicy, UploadPolicy
from storage.kv import SqlKeyValueStore
from storage.timer_services import SqlCronJobs, SqlTimers
from workers.jobs.downloads import SqlDownloads
from workers.jobs.service import SqlJobs

__all__ = ["runtime_of"]


def runtime_of(parts: Parts) -> runtime.Runtime:
    """Return the SDK's runtime with this process's implementations of its ports."""
    settings = parts.settings
    return runtime.Runtime(
        data_dir=settings.data_dir,
        store=SqlKeyValueStore(parts.database, settings.store),
        messages=SqlMessages(
            parts.database, parts.publisher, debounce_seconds=settings.agent.debounce_seconds
        ),
        areas=parts.areas,
        timers=SqlTimers(parts.database),
        cron_jobs=SqlCronJobs(parts.database, on_fire=parts.firings.fire),
        jobs=SqlJobs(parts.database, parts.background, parts.publisher),
        records=SqlRecords(parts.database, parts.publisher),
        intake=parts.intake,
        download_claims=SqlDownloads(
            parts.leases,
            parts.background,
            data_dir=settings.data_dir,
            owner=parts.node,
            lease_seconds=settings.agent.lease_seconds,
        ),
        hooks=parts.host,
        store_policy=StorePolicy(max_value_bytes=settings.store.max_value_bytes),
        downloads=DownloadPolicy(
            max_bytes=settings.downloads.max_bytes,
            timeout_seconds=settings.downloads.timeout_seconds,
            allow_private=tuple(settings.downloads.allow_private),
            connections=settings.downloads.connections,
        ),
        packages=package_policy(settings.plugins),
        uploads=UploadPolicy(chat_bytes=settings.uploads.chat_bytes, chat_names=settings.uploads.chat_names),
        core=core_config(settings),
        model_budget=PluginModels(parts.spending, settings),
    )
