"""A call that a worker receives after its deadline."""

from __future__ import annotations

import asyncio
from datetime import datetime

import pytest
from waiting import WAIT_SECONDS

from broker_config.embedded import resolve_signing_key
from nekro.app.calls.dispatch import CallScope
from nekro.app.services import Services
from nekro.broker.delivery.messages import CallMessage
from nekro.wire.invocation import Signer, new_id
from nekro.wire.values import encode_arguments


async def check_refusal(services: Services, *, chat_key: str, deadline: datetime) -> None:
    """Send a call of ``journal`` with an expired deadline; it is refused and does not start."""
    entry = await services.find_method("journal")
    scope = CallScope(chat=await services.chat(chat_key), user_id=None)
    late = scope.call(entry, encode_arguments((-7,), {}), call_id=new_id(), deadline=deadline)
    signer = Signer.from_text(resolve_signing_key(services.settings).get_secret_value())
    message = CallMessage.of(late, signer=signer, lane="methods", reply_to=None)
    assert await services.publisher.calls_lost([message]) == 1
    answer = services.app.AsyncResult(late.call_id)
    with pytest.raises(Exception, match=r"deadline of call .* passed in the queue"):
        await asyncio.to_thread(answer.get, timeout=WAIT_SECONDS)
    journal = services.areas.plugin_dir("tests.probe") / "journal.txt"
    assert not journal.exists() or "-7" not in journal.read_text().splitlines()
