"""The checks of `nekro doctor`: one line per check, with a suggested fix where something is wrong."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from broker_config.embedded import resolve_settings
from broker_config.settings import LLMSettings, Settings
from broker_config.urls import without_password
from nekro.app.extensions import imported, loaded
from nekro.cli.doctor.file_checks import files_check
from nekro.cli.doctor.service_checks import (
    Check,
    CheckState,
    approval_checks,
    broker_checks,
    clock_checks,
    database_check,
    gateway_checks,
)
from nekro.cli.running import ExitCode
from nekro.cli.services.ownership import read_running
from nekro_agent import layout
from nekro_agent.errors import NekroError, SandboxError
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from nekro.sandbox.driver import Enforcement

__all__ = ["language_model_check", "run_checks"]

_LOW_DISK_BYTES: Final = 1 << 30
#: How long an endpoint may take to answer that it is there.
_ENDPOINT_SECONDS: Final = 5.0


async def run_checks(settings: Settings) -> list[Check]:
    """Run every check; a failed check does not stop the others."""
    detail = "read; every name known, every value in its bounds"
    if settings.agent.keep_prompts:
        days = f"{settings.retention.prompts_days:g} days"
        detail += f"; what rounds send to the model is stored for {days} (NEKRO_AGENT__KEEP_PROMPTS)"
    checks = [Check(name="settings", verdict=CheckState.OK, detail=detail), _data_dir(settings)]
    checks += await asyncio.to_thread(broker_checks, settings)
    checks.append(await database_check(settings))
    checks.append(await files_check(settings))
    checks += await clock_checks(settings)
    checks += await _sandbox(settings)
    checks.append(_sandbox_packages(settings))
    checks.append(await asyncio.to_thread(_plugins, settings))
    checks.append(await asyncio.to_thread(_workers, settings, broken=_is_broken(checks, ExitCode.BROKER)))
    checks += await asyncio.to_thread(_local_workers, settings)
    checks.append(await language_model_check(settings))
    checks += await gateway_checks(settings)
    checks += await approval_checks(settings)
    for extension in loaded(settings):
        if extension.checks is not None:
            checks += await imported(extension.checks)(settings)
    return checks


def _is_broken(checks: Sequence[Check], code: ExitCode) -> bool:
    return any(check.verdict is CheckState.FAILED and check.code is code for check in checks)


def _data_dir(settings: Settings) -> Check:
    directory = settings.data_dir
    standing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=standing).close()  # root has each access that `os.access` asks about
    except OSError as exc:
        return Check(
            name="data directory",
            verdict=CheckState.FAILED,
            detail=f"{standing} cannot be written to ({exc.strerror})",
            fix="set NEKRO_DATA_DIR to a writable directory",
        )
    free_bytes = shutil.disk_usage(standing).free
    low = free_bytes < _LOW_DISK_BYTES
    return Check(
        name="data directory",
        verdict=CheckState.WARNING if low else CheckState.OK,
        detail=f"{directory}, {free_bytes / (1 << 30):.1f} GiB free"
        + ("" if directory.exists() else " (does not exist yet)"),
        fix="free disk space" if low else "",
    )


async def _sandbox(settings: Settings) -> list[Check]:
    """Return one check per part of the isolation; a missing part that is optional is a warning."""
    from nekro.sandbox.drivers.selection import describe

    try:
        shared_root = layout.shared_dir(settings.data_dir.absolute(), "any").parent
        capability = await describe(settings.sandbox, shared_root=shared_root)
    except SandboxError as exc:
        return [Check(name="sandbox", verdict=CheckState.FAILED, detail=str(exc), code=ExitCode.SANDBOX)]
    lines = [
        Check(
            name=f"sandbox {part.name.removeprefix('sandbox ')}",
            verdict=CheckState.OK if part.ok else CheckState.FAILED if part.needed else CheckState.WARNING,
            detail=part.detail,
            fix="" if part.ok else part.fix,
            code=ExitCode.SANDBOX,
        )
        for part in capability.checks
    ]
    lines += [_sandbox_limit(limit) for limit in capability.limits]
    verdict = CheckState.OK if capability.ok else CheckState.FAILED
    ran = "ran a sandbox" if capability.ok else "cannot run code here"
    summary = Check(
        name="sandbox", verdict=verdict, detail=f"driver {capability.driver} {ran}", code=ExitCode.SANDBOX
    )
    return [summary, *lines]


def _sandbox_packages(settings: Settings) -> Check:
    from nekro.sandbox.packages.base import base_root, named_packages

    name = "sandbox packages"
    if settings.sandbox.python is not None:
        detail = f"those of {settings.sandbox.python}"
    else:
        detail = named_packages(settings.sandbox)
    if detail:
        return Check(name=name, verdict=CheckState.OK, detail=detail)
    return Check(
        name=name,
        verdict=CheckState.WARNING,
        detail=f"none for this Python in {base_root(settings.sandbox)}: code of the model has the standard "
        "library only",
        fix="nekro sandbox packages build",
    )


def _sandbox_limit(limit: Enforcement) -> Check:
    return Check(
        name=f"sandbox limit {limit.limit}",
        verdict=CheckState.OK if limit.ok else CheckState.FAILED if limit.required else CheckState.WARNING,
        detail=f"{limit.by}: {limit.detail}",
        fix=limit.fix,
        code=ExitCode.SANDBOX,
    )


def _plugins(settings: Settings) -> Check:
    from nekro.cli.views.catalogue import read_catalogue
    from nekro.plugins.entries import PluginStatus
    from nekro.plugins.entry_registry import Registry

    catalogue = asyncio.run(read_catalogue(settings))
    differences = catalogue.differences()
    failed = [plugin for plugin in catalogue.plugins if plugin.status is PluginStatus.FAILED]
    loaded = len(catalogue.plugins) - len(failed)
    detail = f"{loaded} loaded with {len(Registry(catalogue.plugins).enabled())} methods"
    if not catalogue.is_live:
        detail += f" (no worker is running; {catalogue.note})"
    if not failed:
        return Check(
            name="plugins",
            verdict=CheckState.WARNING if differences else CheckState.OK,
            detail="; ".join([detail, *differences]),
            fix="restart the workers that run older files" if differences else "",
        )
    faults = "; ".join(f"{plugin.key}: {plugin.error}" for plugin in failed)
    return Check(
        name="plugins",
        verdict=CheckState.FAILED,
        detail=f"{detail}; {len(failed)} failed to load: {faults}",
        fix="correct the plugin, or take it out of NEKRO_PLUGINS__DIRS",
        code=ExitCode.PLUGIN,
    )


def _workers(settings: Settings, *, broken: bool) -> Check:
    if settings.broker.url is None:
        running = read_running(settings.data_dir)
        if running is None:
            return Check(
                name="workers",
                verdict=CheckState.OK,
                detail="none; commands start their own, `nekro up` keeps workers running",
            )
        served = sorted(running.lanes)
        source = f"`nekro {running.command}` (process {running.pid})"
    elif broken:
        return Check(name="workers", verdict=CheckState.WARNING, detail="unknown while the broker is down")
    else:
        served, source = sorted(_ask_broker(settings)), "the broker"
    # Without a process of lane `pinned`, those of lane `methods` own the pinned plugins.
    missing = [lane.value for lane in Lane if lane is not Lane.PINNED and lane.value not in served]
    return Check(
        name="workers",
        verdict=CheckState.WARNING if missing else CheckState.OK,
        detail=f"{source}: lanes {', '.join(served) or 'none'}",
        fix="; ".join(f"start `nekro worker --lane {lane}`" for lane in missing),
    )


def _local_workers(settings: Settings) -> list[Check]:
    from nekro.cli.services.presence import Probe, ask_workers, wanted_of

    try:
        answers = ask_workers(Probe.READY, wanted_of(settings))
    except NekroError as exc:
        return [Check(name="worker probes", verdict=CheckState.WARNING, detail=str(exc))]
    return [
        Check(
            name=f"worker {answer.worker} (process {answer.pid})",
            verdict=CheckState.OK if answer.ok else CheckState.WARNING,
            detail="; ".join(answer.faults) or "ready",
            fix="" if answer.ok else "see the log of this worker; wait until it is ready, or restart it",
        )
        for answer in answers
    ]


def _ask_broker(settings: Settings) -> set[str]:
    from broker_config.app import create_app
    from nekro.broker.broker_figures import lane_workers
    from nekro.cli.local_api import follow_shared_time

    settings = resolve_settings(settings)
    follow_shared_time(settings)  # workers refuse commands whose time is far from theirs
    app = create_app(settings)
    try:
        return set(lane_workers(app))
    finally:
        app.close()


async def language_model_check(settings: Settings) -> Check:
    """Check that the configured model is set up, and that its endpoint answers."""
    llm = settings.llm
    if llm.script is not None:
        found = llm.script.is_file()
        return Check(
            name="language model",
            verdict=CheckState.OK if found else CheckState.FAILED,
            detail=f"answers from {llm.script}" + ("" if found else ", which is not a file"),
            fix="" if found else "correct NEKRO_LLM__SCRIPT",
            code=ExitCode.USAGE,
        )
    if llm.base_url is None:
        return Check(
            name="language model",
            verdict=CheckState.WARNING,
            detail="none; `nekro exec` and `nekro call` work without one, rounds need one",
            fix="set NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL",
        )
    if not llm.model:
        return Check(
            name="language model",
            verdict=CheckState.FAILED,
            detail=f"{llm.base_url} without a model name",
            fix="set NEKRO_LLM__MODEL",
            code=ExitCode.USAGE,
        )
    return await _endpoint(settings.llm)


async def _endpoint(llm: LLMSettings) -> Check:
    """Ask for the list of models: any response shows that something serves HTTP there."""
    import httpx

    from nekro.agent.llm.protocols import PROTOCOLS
    from nekro_client.answer_limits import limited

    protocol = PROTOCOLS[llm.protocol]
    where = f"{llm.model} at {without_password(llm.base_url or '')}, protocol {protocol.name}"
    key = llm.api_key.get_secret_value() if llm.api_key else ""
    try:
        async with httpx.AsyncClient(
            timeout=_ENDPOINT_SECONDS, proxy=llm.proxy, event_hooks=limited()
        ) as client:
            url = protocol.models_url(llm.base_url or "")
            status = (await client.get(url, headers=protocol.headers(key))).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        return Check(
            name="language model",
            verdict=CheckState.FAILED,
            detail=f"{where} is unreachable: {type(exc).__name__} {exc}".replace(key or "\0", "***").rstrip(),
            fix="start the endpoint, or correct NEKRO_LLM__BASE_URL; `nekro models test` asks it a question",
            code=ExitCode.LLM,
        )
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return Check(
            name="language model",
            verdict=CheckState.WARNING,
            detail=f"{where} refuses the key (status {status})",
            fix="set NEKRO_LLM__API_KEY",
        )
    detail = f"{where}; `nekro models test` shows the parameters that it refuses"
    return Check(name="language model", verdict=CheckState.OK, detail=detail)
