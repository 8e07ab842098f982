"""Signatures of the requests between gateways and the HTTP servers of plugins."""

from __future__ import annotations

import pytest

from nekro.wire import seals
from nekro.wire.seals import HttpSigner, HttpVerifier
from nekro_agent.errors import MessageRefusedError

ASKED = {"method": "GET", "target": "/plugins/a.b/?x=1", "plugin_key": "a.b"}


def test_a_signature_admits_its_request_once_and_proves_the_answer() -> None:
    header, proof = HttpSigner("key").sign(**ASKED)
    verifier = HttpVerifier("key")
    assert verifier.verify(header, **ASKED) == proof
    with pytest.raises(MessageRefusedError, match="used before"):
        verifier.verify(header, **ASKED)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "POST"},
        {"target": "/plugins/a.b/?x=2"},
        {"target": "/plugins/a.b/"},
        {"plugin_key": "a.c"},
    ],
)
def test_a_signature_is_for_one_request_only(changed: dict[str, str]) -> None:
    header, _ = HttpSigner("key").sign(**ASKED)
    with pytest.raises(MessageRefusedError, match="not signed"):
        HttpVerifier("key").verify(header, **{**ASKED, **changed})


def test_a_stated_caller_belongs_to_its_request() -> None:
    signer, verifier = HttpSigner("key"), HttpVerifier("key")
    signature, other = (signer.sign(**ASKED)[0] for _ in range(2))
    stated = signer.vouch("Ada.x", signature=signature)
    assert verifier.caller(stated, signature=signature) == "Ada.x"
    for header, of in ((stated, other), (f"{stated}y", signature), ("Ada.x", signature), ("\u00fc.x", other)):
        with pytest.raises(MessageRefusedError, match="caller is not signed"):
            verifier.caller(header, signature=of)


@pytest.mark.parametrize("header", ["", ".", "..", "1.2.3", "1.2.\u00fc", "x" * 100_000, "\x00.\x00.\x00"])
def test_other_texts_are_refused(header: str) -> None:
    with pytest.raises(MessageRefusedError, match="not signed"):
        HttpVerifier("key").verify(header, **ASKED)


def test_parts_of_a_signature_cannot_be_changed() -> None:
    issued_at, random, digest = HttpSigner("key").sign(**ASKED)[0].split(".")
    for header in (
        f"{int(issued_at) + 1}.{random}.{digest}",
        f"{issued_at}.{random[:-1]}.{digest}",
        f"{issued_at}{random}..{digest}",
    ):
        with pytest.raises(MessageRefusedError, match="not signed"):
            HttpVerifier("key").verify(header, **ASKED)
    with pytest.raises(MessageRefusedError, match="not signed"):
        HttpVerifier("another key").verify(f"{issued_at}.{random}.{digest}", **ASKED)


def test_an_old_signature_is_refused_and_old_random_numbers_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = [1000.0]
    monkeypatch.setattr(seals, "shared_now", lambda: times[0])
    signer, verifier = HttpSigner("key"), HttpVerifier("key")
    old, _ = signer.sign(**ASKED)
    used, _ = signer.sign(**ASKED)
    verifier.verify(used, **ASKED)
    for moment in (1031.0, 969.0):
        times[0] = moment
        with pytest.raises(MessageRefusedError, match="too old"):
            verifier.verify(old, **ASKED)
    times[0] = 1100.0
    verifier.verify(signer.sign(**ASKED)[0], **ASKED)
    assert len(verifier._seen) == 1
    with pytest.raises(MessageRefusedError, match="too old"):
        verifier.verify(used, **ASKED)
