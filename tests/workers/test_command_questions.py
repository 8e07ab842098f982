"""The question of a command stays open while its answer cannot be sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from redis_process import RedisServer

from broker_config.settings import DatabaseSettings, Settings
from nekro.app import use_cases
from nekro.app.services import CALLER, Services
from nekro_agent.commands.registration import CmdCtl
from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponse
from nekro_agent.errors import BrokerUnavailableError, InvalidValueError
from workers.services import WorkerServices

PLUGIN = """
from nekro_agent.api.plugin import CmdCtl, NekroPlugin

plugin = NekroPlugin("P", "p", "", "1", "tests", "")


@plugin.mount_command(name="ask", description="Ask for a colour")
async def ask(context):
    yield CmdCtl.wait("Which colour?", callback_cmd="ask")
"""
WHO = CommandExecutionContext(user_id="ada", username="ada", chat_key="chat")


@pytest.fixture
async def services(
    make_settings: Callable[..., Settings],
    migrated_copy: Callable[[str], DatabaseSettings],
    own_redis: RedisServer,
    tmp_path: Path,
) -> AsyncIterator[Services]:
    """The services of a caller, beside those of a worker that has published its commands."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "p.py").write_text(PLUGIN)
    settings = make_settings(
        broker={"url": own_redis.url},
        database=migrated_copy("sqlite").model_dump(),
        plugins={"dirs": (tmp_path / "plugins",), "load_shipped": False},
    )
    worker, services = WorkerServices.load(settings, role="methods"), Services.load(settings, role=CALLER)
    await worker.start()
    await services.start()
    yield services
    await services.close()
    await worker.close()


async def answer(services: Services, line: str) -> list[CommandResponse]:
    return await use_cases.run_command(services, line, who=WHO, timeout_seconds=5)


async def test_an_answer_that_was_not_sent_may_be_given_again(
    services: Services, own_redis: RedisServer
) -> None:
    with pytest.raises(InvalidValueError, match="no command waits"):
        await answer(services, "green")
    asked = CmdCtl.wait("Which colour?", callback_cmd="ask", context_data={"page": 1})
    await services.command_sender._keep_question(asked, "/ask", "chat", "ada")
    own_redis.kill()
    for _ in range(2):
        with pytest.raises(BrokerUnavailableError):
            await answer(services, "green")
