"""Prints replays of programs: of a turn, of another model's answers, of cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nekro.cli.output import Output

if TYPE_CHECKING:
    from nekro.app.rounds.replays import Difference, ProgramReplay
    from nekro.app.rounds.turn_replays import AskedRound

__all__ = ["asked_json", "program_json", "show_asked", "show_program"]


def show_program(program: ProgramReplay, output: Output, *, indent: str = "") -> None:
    """Print how a program ran, and each difference."""
    output.report(f"{indent}round {program.number}: {_how(program)}: {_verdict(program.differences)}")
    _show_differences(program.differences, output, indent=indent)


def show_asked(asked: AskedRound, output: Output) -> None:
    """Print what another model answered, and each difference."""
    answer = asked.answer
    tokens = f"{answer.prompt_tokens or 0} + {answer.answer_tokens or 0} tokens"
    what = "a message" if asked.words is not None else "no program"
    if asked.program is not None:
        which = "the same program" if asked.code == asked.code_before else "another program"
        what = f"{which}, {_how(asked.program)}"
    head = f"round {asked.number}: {answer.group} ({answer.model}, {tokens}): {what}"
    output.report(f"{head}: {_verdict(asked.differences)}")
    _show_differences(asked.differences, output)
    if asked.prompt_chars is not None and asked.sent_chars != asked.prompt_chars:
        output.report(
            f"  sent {asked.sent_chars:,} of the prompt's {asked.prompt_chars:,} characters, as kept"
        )
    if asked.code is not None and asked.code != asked.code_before:
        output.report("  program:")
        for line in asked.code.split("\n"):
            output.report(f"    {line}")


def program_json(program: ProgramReplay) -> dict[str, Any]:
    """Describe how a program ran."""
    return {
        "round_id": program.round_id,
        "number": program.number,
        "code": program.code,
        "stop_type": program.stop_type.name,
        "output": program.output,
        "calls": program.calls,
        "answered": program.answered,
        "made": [
            {
                "method": call.path,
                "arguments": call.arguments.decode(errors="replace"),
                "line": call.line,
                "is_recorded": call.recorded is not None,
            }
            for call in program.made
        ],
        "seconds": round(program.seconds, 3),
        "differences": _differences_json(program.differences),
    }


def asked_json(asked: AskedRound) -> dict[str, Any]:
    """Describe what another model answered."""
    answer = asked.answer
    return {
        "number": asked.number,
        "group": answer.group,
        "model": answer.model,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.answer_tokens,
        "tokens_estimated": answer.is_estimated,
        "cost": answer.cost,
        "prompt_chars": asked.prompt_chars,
        "sent_chars": asked.sent_chars,
        "code_before": asked.code_before,
        "code": asked.code,
        "words": asked.words,
        "program": None if asked.program is None else program_json(asked.program),
        "differences": _differences_json(asked.differences),
    }


def _how(program: ProgramReplay) -> str:
    calls = f"{program.answered} of {program.calls} calls answered as recorded"
    return f"{calls}, {program.stop_type.name}, {program.seconds * 1000:.0f} ms"


def _verdict(differences: Sequence[Difference]) -> str:
    return "differs" if differences else "the same"


def _show_differences(differences: Sequence[Difference], output: Output, *, indent: str = "") -> None:
    for one in differences:
        where = "" if one.line is None else f" (line {one.line})"
        first, *lines = one.text.split("\n")
        output.report(f"{indent}  {one.kind}{where}: {first}")
        for line in lines:
            output.report(f"{indent}    {line}")


def _differences_json(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    return [{"kind": one.kind, "text": one.text, "line": one.line} for one in differences]
