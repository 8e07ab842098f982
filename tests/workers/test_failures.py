"""Conversion of a plugin's exception into an error for the caller."""

from __future__ import annotations

import pytest

from nekro.base.redaction import Redactor
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.errors import MethodFailedError
from workers.calls.handler import explained, redacted

REDACTOR = Redactor(["hunter22"])


async def method(_ctx: AgentCtx, count: int, ratio: float = 1.0, name: str = "") -> None:
    """Do nothing."""


def test_an_ordinary_exception_is_unchanged() -> None:
    error = ValueError("no such city")
    assert redacted(error, REDACTOR) is error


def test_a_secret_in_the_text_is_replaced_and_the_type_kept() -> None:
    shown = redacted(ValueError("key hunter22 refused"), REDACTOR)
    assert isinstance(shown, MethodFailedError)
    assert (shown.error_type, shown.error_message) == ("ValueError", "key [secret] refused")


@pytest.mark.parametrize("explicit", [True, False])
def test_a_secret_in_a_cause_is_replaced_because_tracebacks_show_it(explicit: bool) -> None:
    try:
        try:
            raise KeyError("hunter22")
        except KeyError as cause:
            if explicit:
                raise RuntimeError("no access") from cause
            raise RuntimeError("no access")  # noqa: B904 - the implicit context is what is tested
    except RuntimeError as exc:
        shown = redacted(exc, REDACTOR)
    assert str(shown) == "RuntimeError: no access"
    assert shown.__cause__ is None and shown.__context__ is None


def test_a_type_error_names_the_arguments_of_unexpected_types() -> None:
    shown = explained(TypeError("unsupported operand"), method, ["3"], {"name": 7})
    assert str(shown) == (
        "TypeError: unsupported operand (argument count is str, the signature says int; "
        "argument name is int, the signature says str)"
    )


def test_matching_arguments_and_other_errors_get_no_hint() -> None:
    own = TypeError("inside")
    assert explained(own, method, [3], {"ratio": 2}) is own
    key = KeyError("x")
    assert explained(key, method, ["3"], {}) is key
