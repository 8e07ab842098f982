"""`nekro trace --follow`: a turn while it happens, beside the workers and over a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_fleet import small_fleet
from forked_process import ForkedCommand
from local_key import local_environment
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

from nekro.cli.views.turn_text import RunningOutput
from nekro_client import Client

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def fleet(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Workers that stop no code because the command that follows it starts late."""
    yield from small_fleet(
        tmp_path_factory.mktemp("fleet"),
        redis_server.url,
        sandbox={"wall_seconds": 6 * WAIT_SECONDS},
        workers={"call_timeout_seconds": 3 * WAIT_SECONDS, "drain_seconds": 10},
    )


@pytest.mark.parametrize("place", ["beside", "over"])
def test_output_is_printed_while_the_code_runs_and_only_once(
    fleet: Fleet, gateway_url: str, tmp_path: Path, place: str
) -> None:
    chat_key = f"counting-{place}"
    plugins = fleet.directory / "plugins"
    with Client(gateway_url) as client:
        turn_id = client.chat(chat_key).send("count slowly", user_id="ada").turn_id
        assert turn_id is not None
        arguments = ("trace", turn_id, "--follow")
        if place == "beside":
            command = fleet.command(*arguments)
        else:
            environ = local_environment(gateway_url, tmp_path)
            command = ForkedCommand("nekro.cli.main", arguments, environ=environ, cwd=tmp_path)
        try:
            lines = [command.stdout.readline()]
            assert lines[0].startswith(f"turn {turn_id}  chat {chat_key}")
            (plugins / f"{chat_key}-first").touch()
            while not lines[-1].endswith("| one\n"):
                lines.append(command.stdout.readline())
                assert lines[-1], command.communicate(WAIT_SECONDS)
            turn = client.turns.get(turn_id)
            assert turn.state == "running", (turn.error, lines)
            (plugins / f"{chat_key}-second").touch()
            rest, fault = command.communicate(WAIT_SECONDS)
        finally:
            command.kill()
        assert command.wait(WAIT_SECONDS) == 0, fault
    told = "".join(lines) + rest
    assert (told.count("| one\n"), told.count("| two\n"), told.count("    output\n")) == (1, 1, 1), told
    assert told.rstrip().split("\n")[-1].startswith("done after "), told


def test_missing_output_is_said_and_makes_it_incomplete() -> None:
    output = RunningOutput()
    assert list(output.add(0, "a\nb")) == ["    output", "         | a"]
    assert list(output.add(3, "c\n")) == ["         | bc"]
    assert output.is_all_of("a\nbc\n")
    missing = "         | … 5 characters are missing here; the round's end has them"
    assert list(output.add(10, "d\n")) == [missing, "         | d"]
    # Another attempt at the round begins again.
    again = RunningOutput()
    assert list(again.add(2, "b\nc")) == ["    output", missing.replace("5", "2"), "         | b"]
    assert list(again.add(0, "a\n")) == ["         | c", "         | a"]
    assert list(again.finish("a\n")) == [] and again.is_all_of("a\n")
    # The end of the round has what is missing, so all of it is printed there.
    assert list(output.finish("a\nbc\n12345d\n")) == [] and not output.is_all_of("a\nbc\n12345d\n")


def test_a_rounds_end_that_is_read_before_its_last_output_comes_completes_it() -> None:
    output = RunningOutput()
    assert list(output.add(0, "one\n")) == ["    output", "         | one"]
    assert list(output.finish("one\ntwo\nlast")) == ["         | two", "         | last"]
    assert output.is_all_of("one\ntwo\nlast")
    assert list(output.add(4, "two\nlast")) == list(output.finish("one\ntwo\nlast")) == []
    # None came before the end, which prints the output itself.
    late = RunningOutput()
    assert list(late.finish("one\n")) == [] and not late.is_all_of("one\n")
    assert list(late.add(0, "one\n")) == []
