"""What `nekro doctor` says of the endpoint of the language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_server import Behaviour, ChatServer, refuse, respond
from pydantic import SecretStr

from broker_config.settings import LLMSettings, Settings
from nekro.cli.doctor.checks import language_model_check
from nekro.cli.doctor.service_checks import CheckState
from nekro.cli.running import ExitCode


def settings_of(base_url: str, tmp_path: Path, **fields: Any) -> Settings:
    llm = LLMSettings(base_url=base_url, model="big", **fields)
    return Settings.load(env_file=None, data_dir=tmp_path, llm=llm)


async def test_an_endpoint_that_is_down_is_unreachable(tmp_path: Path) -> None:
    async with ChatServer([]) as server:
        url = server.base_url
    check = await language_model_check(settings_of(url, tmp_path))
    assert (check.verdict, check.code) == (CheckState.FAILED, ExitCode.LLM)
    assert "big" in check.detail and "unreachable" in check.detail and "NEKRO_LLM__BASE_URL" in check.fix


@pytest.mark.parametrize(
    ("behaviour", "verdict"),
    [
        (respond(200, {"data": []}), CheckState.OK),
        (refuse(404), CheckState.OK),
        (refuse(401), CheckState.WARNING),
        (refuse(403), CheckState.WARNING),
    ],
)
async def test_any_response_shows_that_an_endpoint_is_there(
    behaviour: Behaviour, verdict: CheckState, tmp_path: Path
) -> None:
    async with ChatServer([behaviour]) as server:
        check = await language_model_check(settings_of(server.base_url, tmp_path))
    assert check.verdict is verdict
    assert ("refuses the key" in check.detail) is (verdict is CheckState.WARNING)


@pytest.mark.parametrize(
    ("protocol", "path", "header"),
    [
        ("openai", "/v1/models", "authorization"),
        ("anthropic", "/v1/models", "x-api-key"),
        ("gemini", "/v1/models", "x-goog-api-key"),
    ],
)
async def test_an_endpoint_is_asked_in_its_own_protocol(
    protocol: str, path: str, header: str, tmp_path: Path
) -> None:
    async with ChatServer([refuse(401)]) as server:
        settings = settings_of(server.base_url, tmp_path, protocol=protocol, api_key=SecretStr("sk-secret"))
        check = await language_model_check(settings)
    assert f"protocol {protocol}" in check.detail and "sk-secret" not in check.detail
    (seen,) = server.seen
    assert seen.path == path and "sk-secret" in seen.headers[header]
