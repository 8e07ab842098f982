"""Commands distinguish a fleet without workers from a slow one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.cli.services import presence
from nekro_agent.errors import BrokerUnavailableError, ServiceError


async def test_a_call_without_a_serving_worker_is_given_up(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_PATIENCE_SECONDS", 0.05)
    app = create_app(make_settings())
    cancelled = asyncio.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    try:
        with pytest.raises(ServiceError, match="nekro worker --lane methods"):
            await presence.awaited_with_workers(never(), lambda: app, lane="methods")
    finally:
        app.close()
    assert cancelled.is_set()


async def test_a_worker_that_starts_later_is_waited_for(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_PATIENCE_SECONDS", 0.05)
    app, questions = create_app(make_settings()), 0

    def ask(_app: object) -> dict[str, int]:
        nonlocal questions
        questions += 1
        return {} if questions == 1 else {"methods": 1}

    monkeypatch.setattr(presence, "_served_lanes", ask)

    async def answered_when_it_is_there() -> int:
        while questions < 2:
            await asyncio.sleep(0.01)
        return 7

    assert await presence.awaited_with_workers(answered_when_it_is_there(), lambda: app, lane="methods") == 7
    app.close()


async def test_a_call_that_is_answered_at_once_returns_its_value(
    make_settings: Callable[..., Settings],
) -> None:
    async def value() -> int:
        return 7

    app = create_app(make_settings())
    assert await presence.awaited_with_workers(value(), lambda: app, lane="methods") == 7


def test_an_unreachable_broker_is_named(make_settings: Callable[..., Settings]) -> None:
    presence.require_broker(make_settings())
    with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:1") as caught:
        presence.require_broker(make_settings(broker={"url": "redis://:s3cret@127.0.0.1:1/0"}))
    assert "s3cret" not in str(caught.value)
