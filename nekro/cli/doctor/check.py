"""The result of one check of `nekro doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nekro.cli.exit_codes import ExitCode

__all__ = ["Check", "Verdict"]


class Verdict(StrEnum):
    """How a check ended."""

    #: No problem was found.
    OK = "ok"
    #: Works, but not as well as it could, or not yet.
    WARNING = "warning"
    #: Something will not work.
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check: one line of `nekro doctor`."""

    name: str
    verdict: Verdict
    detail: str
    #: Suggested fix; "" when none is needed.
    fix: str = ""
    #: Exit code of the command when this is the first failure.
    code: ExitCode = ExitCode.FAILED
