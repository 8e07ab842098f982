"""A worker's log records: one form, the right fields, no secrets and no arguments."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loguru import logger

from broker_config.settings import Settings
from nekro.app.processes import configure_logs
from nekro.base.redaction import Redactor
from nekro_agent.core.logger import configure, get_sub_logger

SECRET = 'pass"word\\of operators'


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    logger.remove()


def lines(sink: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_a_json_line_contains_the_event_its_fields_and_the_process_identity() -> None:
    sink = io.StringIO()
    configure(json_lines=True, sink=sink, fields={"lane": "methods", "worker": "m@host"})
    with logger.contextualize(call_id="c1", chat_key="群 {1} <b>"):
        get_sub_logger("plugin", size=3).info("value_stored")
    logger.info("after")
    first, second = lines(sink)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO",
        "logger": "plugin",
        "event": "value_stored",
        "lane": "methods",
        "worker": "m@host",
        "call_id": "c1",
        "chat_key": "群 {1} <b>",
        "size": 3,
    }
    assert "call_id" not in second and second["logger"] == "nekro"


def test_a_text_line_omits_fields_that_are_the_same_in_every_line() -> None:
    sink = io.StringIO()
    configure(sink=sink, fields={"worker": "m@host"})
    logger.bind(chat_key="{odd} <red>key</red>").info("round {} <green>", 7)
    assert sink.getvalue().endswith('nekro round 7 <green> chat_key="{odd} <red>key</red>"\n')
    assert "m@host" not in sink.getvalue()


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_secret_appears_neither_in_fields_nor_in_tracebacks(json_lines: bool) -> None:
    sink = io.StringIO()
    configure(json_lines=json_lines, sink=sink, redact=Redactor([SECRET]))
    try:
        raise ValueError(f"refused {SECRET}")
    except ValueError:
        logger.bind(url=f"redis://u:{SECRET}@h/0", nested=[SECRET]).exception("failed with {}", SECRET)
    text = sink.getvalue()
    assert "ValueError: refused [secret]" in text
    assert SECRET not in text and json.dumps(SECRET)[1:-1] not in text


def test_standard_library_logging_uses_the_same_sink_without_arguments(
    make_settings: Callable[..., Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(log={"json_lines": True, "level": "DEBUG"})
    configure_logs(settings, lane="methods", worker="m@host")
    data = {"args": "('told in confidence',)", "name": "a.b.c"}
    logging.getLogger("celery.worker.strategy").debug("TaskPool: Apply %(name)s %(args)s", data)
    logging.getLogger("celery.worker").warning("lost %s", "redis://:test-signing-key@h", extra={"data": data})
    logging.getLogger("odd").log(15, "between the levels {}")
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["event"], line["level"]) for line in records] == [
        ("celery.worker", "lost redis://:[secret]@h", "WARNING"),
        ("odd", "between the levels {}", "Level 15"),
    ]
    assert records[0]["lane"] == "methods" and records[0]["worker"] == "m@host"
