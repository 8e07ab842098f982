"""Exposure to other users of the host, other writers on the broker, and the operator's terminal."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

import pytest
from pydantic import SecretBytes

from broker_config.embedded import resolve_settings
from broker_config.settings import Settings
from nekro.cli.output import Output
from nekro.wire.invocation import Signer
from nekro_agent.errors import MessageRefusedError


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


#: Seven- and eight-bit control sequences, a bell, DEL and a change of the reading direction.
HOSTILE = "\x1b]0;owned\x07 \x9b2J \x7f \u202egnp.exe"
OBEYED = ("\x1b]", "\x07", "\x9b", "\x7f", "\u202e")


def test_new_data_directory_is_closed_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.model_validate({"data_dir": tmp_path / "new" / "data"})
    before = os.umask(0)
    try:
        resolve_settings(settings)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "data").stat().st_mode) == 0o700


def test_existing_data_directory_is_closed_to_other_users(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o750)
    resolve_settings(Settings.model_validate({"data_dir": tmp_path / "data"}))
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


@pytest.mark.parametrize("signature", ["é" * 64, "\ud800", "", "0" * 63 + "\u0660"])
def test_malformed_signature_is_refused_like_a_wrong_one(signature: str) -> None:
    body = {"invocation": {"version": 1}, "signature": signature}
    with pytest.raises(MessageRefusedError, match="signature does not match"):
        Signer(SecretBytes(b"k" * 32)).verify(body)


def test_printed_text_cannot_control_the_terminal() -> None:
    out, err = Terminal(), Terminal()
    output = Output(stdout=out, stderr=err)
    output.data(HOSTILE)
    output.words(HOSTILE)
    output.table(["name"], [[HOSTILE]])
    output.error(OSError(HOSTILE))
    output.json({"text": HOSTILE, "\x9bkey": ["\U000e0001"]})
    assert not [mark for mark in OBEYED if mark in out.getvalue() + err.getvalue()]


def test_json_is_equivalent_on_a_terminal() -> None:
    out = Terminal()
    Output(stdout=out, stderr=Terminal()).json({"text": HOSTILE, "more": "\U000e0001 ü 日"})
    assert json.loads(out.getvalue()) == {"text": HOSTILE, "more": "\U000e0001 ü 日"}
