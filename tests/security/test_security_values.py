"""Values between sandboxed code and a worker: hostile arguments and careless results."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from broker_config.settings import DatabaseSettings, SandboxSettings, Settings
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.models import ARGUMENT_ERROR, Raised, Returned, StopType, StubCall, StubResult
from nekro.wire.values import decode_arguments, encode_value
from nekro_agent.errors import ArgumentError, ResultError, SandboxUnavailableError
from storage.engine import Database

sys.path.insert(0, str(Path(__file__).parent.parent / "sandbox"))
sys.path.insert(0, str(Path(__file__).parent.parent / "codec"))

from hostile_texts import corpus
from sandbox_lab import Lab, lab, method

MOST_BYTES = SandboxSettings().argument_bytes
SECRET = "sk-very-secret"

#: Sends each payload as the arguments of a call of its own and reports the outcome.
SEND_EACH = """
import json, os, socket, struct
# Without the time limit that the channel gives its reads.
socket.socket(fileno=os.dup(3)).setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16))
def exactly(count):
    parts = b""
    while len(parts) < count:
        parts += os.read(3, count - len(parts))
    return parts
answers = []
for number, payload in enumerate(json.load(open("/app/uploads/corpus")), 1):
    payload = bytes.fromhex(payload)
    data = struct.pack(">IBI", len(payload) + 10, 3, number) + b"take\\0" + payload
    while data:
        data = data[os.write(3, data):]
    length, kind, call_id = struct.unpack(">IBI", exactly(9))
    body = exactly(length - 5)
    answers.append((kind, call_id, json.loads(body)["kind"] if kind == 5 else None))
print(answers == [(5, number, "argument") for number in range(1, len(answers) + 1)], len(answers))
"""


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Lab]:
    settings = SandboxSettings()
    driver = BwrapDriver(settings)
    try:
        _ = driver.tools, driver.interpreter
    except SandboxUnavailableError as exc:
        pytest.skip(str(exc))
    async with lab(tmp_path, use=driver, max_calls=1000) as made:
        yield made


@pytest.mark.extended
async def test_attack_R4_hostile_texts_raise_inside_and_do_nothing_outside(box: Lab) -> None:
    payloads = [data for _, data in corpus() if len(data) <= MOST_BYTES and not is_harmless(data)]
    (box.areas.uploads_dir("chat") / "corpus").write_text(json.dumps([data.hex() for data in payloads]))
    before = dict(os.environ), set(sys.modules)
    taken: list[object] = []

    async def take(call: StubCall) -> StubResult:
        try:
            taken.append(decode_arguments(call.arguments, max_bytes=MOST_BYTES))
        except ArgumentError as exc:
            return Raised(error_type=ARGUMENT_ERROR, message=str(exc))
        return Returned(value=b"null")

    result = await box.run(SEND_EACH, dispatch=take, methods=[method("take")])
    assert (result.stop_type, result.output) == (StopType.NORMAL, f"True {len(payloads)}\n"), result
    assert len(payloads) > 70 and taken == []
    assert (dict(os.environ), set(sys.modules)) == before


def is_harmless(data: bytes) -> bool:
    """Whether the decoder accepts it; the decoder's own tests determine which payloads that is."""
    try:
        decode_arguments(data, max_bytes=MOST_BYTES)
    except ArgumentError:
        return False
    return True


def settings_with_a_secret() -> object:
    return Settings.model_validate({"llm": {"api_key": SECRET}})


def a_database() -> object:
    return Database(DatabaseSettings(url=f"postgresql://user:{SECRET}@127.0.0.1:1/x"), Path("/tmp"))


def an_open_file() -> object:
    return open(os.devnull)


@pytest.mark.parametrize("make", [settings_with_a_secret, a_database, an_open_file, threading.Lock])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"deep": [value]}], ids=["bare", "deep"])
async def test_attack_R20_R21_values_that_must_stay_or_cannot_go_are_named_errors(
    box: Lab, make: Callable[[], object], wrap: Callable[[object], object]
) -> None:
    value = make()
    sent: list[bytes] = []

    async def get(call: StubCall) -> StubResult:
        try:
            sent.append(encode_value(wrap(value), max_bytes=1 << 20))
        except ResultError as exc:
            return Raised(error_type="ResultError", message=str(exc))
        return Returned(value=sent[-1])

    result = await box.run("get()", dispatch=get, methods=[method("get")])
    assert sent == [], "nothing of it is sent"
    assert result.error is not None and "ResultError" in result.error
    assert type(value).__name__.lower().strip("_") in result.error.lower()
    assert SECRET not in result.output + result.error
    if hasattr(value, "close"):
        value.close()
