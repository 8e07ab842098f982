"""Error replies of different Redis versions map to the same exception classes."""

from __future__ import annotations

import pytest
from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

from broker_config.primaries import NotPrimaryError, WritesRefusedError, error_of_reply, unwrapped

#: Replies of Redis 6.2.14 and 7.0.15 to a script that writes while the memory is exhausted.
OF_6_2 = (
    "ERR Error running script (call to f_3bdc7988a621272f6955badcbb08431b79aaeb0b): @user_script:11: "
    "@user_script: 11: -OOM command not allowed when used memory > 'maxmemory'."
)
OF_7_0 = (
    "OOM command not allowed when used memory > 'maxmemory'. script: "
    "3bdc7988a621272f6955badcbb08431b79aaeb0b, on @user_script:11."
)


@pytest.mark.parametrize("line", [OF_6_2, OF_7_0, "OOM in words that no version has used yet"])
def test_exhausted_memory_inside_a_script_has_its_own_class(line: str) -> None:
    assert type(error_of_reply(line)) is OutOfMemoryError


def test_other_codes_inside_a_script_keep_their_class() -> None:
    wrapped = "ERR Error running script (call to f_0): @user_script:2: @user_script: 2: -READONLY No writes"
    assert type(error_of_reply(wrapped)) is NotPrimaryError
    assert type(error_of_reply("NOSCRIPT No matching script.")) is NoScriptError


@pytest.mark.parametrize("code", ["READONLY", "MASTERDOWN", "TRYAGAIN", "UNBLOCKED"])
def test_a_read_only_replica_is_a_lost_connection(code: str) -> None:
    assert type(error_of_reply(f"{code} in any words")) is NotPrimaryError


@pytest.mark.parametrize("code", ["MISCONF", "NOREPLICAS"])
def test_a_primary_that_refuses_writes_has_its_own_class(code: str) -> None:
    assert type(error_of_reply(f"{code} in any words")) is WritesRefusedError


def test_an_error_of_the_script_itself_stays_a_response_error() -> None:
    line = "ERR Error running script (call to f_0): @user_script:1: user_script:1: attempt to call nil"
    assert type(error_of_reply(line)) is ResponseError


def test_unwrapping_returns_an_error_without_a_cause_unchanged() -> None:
    error = ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    assert unwrapped(error) is error
    assert type(unwrapped(ResponseError(OF_6_2.removeprefix("ERR ")))) is OutOfMemoryError
