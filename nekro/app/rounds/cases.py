"""Regression cases: programs with recorded answers in a file, and what they must do.

A case needs no database, no key and no worker. A call is known by its method and arguments, so the ids that
it had are not in the file. Secrets of the settings and paths of the host are removed when a case is written.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from broker_config.settings import Settings
from nekro.app.calls.journal import CallIds
from nekro.app.rounds.replays import NextId, ProgramReplay, RecordedCall, Recording, name_of, open_replayer
from nekro.sandbox.models import Raised, Returned, Stopped, StopType, StubResult
from nekro.wire import plain_json
from nekro_agent.errors import UsageError
from nekro_agent.methods import SandboxMethodType

__all__ = ["Case", "CaseResult", "case_of", "find_cases", "read_case", "run_cases", "write_case"]

#: Of the form of files.
_VERSION: Final = 1
_SUFFIXES: Final = (".yaml", ".yml")
#: A case is text that people read; a turn has at most some megabytes.
_MOST_BYTES: Final = 64 << 20
#: What aliases may add to it.
_ALIASED_BYTES: Final = 1 << 20
_HEAD: Final = "# A case of `nekro eval`: programs, the answers to their calls, and what they must do.\n"
_HEX: Final = r"^[0-9a-f]{64}$"
#: Characters that clocks note; see ``nekro.sandbox.guest.readings``.
_READINGS: Final = r"^[0-9a-z,.:+-]*$"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CaseError(_Part):
    """What a call raised."""

    type: str
    message: str = ""


class CaseCall(_Part):
    """A call that a program must make, and its answer: one of ``value``, ``raises`` and ``stops``."""

    method: str = Field(pattern=r"^\w[\w.]*$")
    #: As in ``RecordedCall``; missing: the function's name.
    called_as: str | None = Field(None, pattern=r"^\w+$")
    type: SandboxMethodType
    #: As the program sends them.
    arguments: Any = None
    value: Any = None
    raises: CaseError | None = None
    #: Name of the stop type that ends the program there.
    stops: str | None = None

    @model_validator(mode="after")
    def _has_one_answer(self) -> Self:
        if len(self.model_fields_set & {"value", "raises", "stops"}) != 1:
            raise ValueError("give one of value, raises and stops")
        if self.stops is not None:
            _stop_of(self.stops)
        return self

    def short_name(self) -> str | None:
        """Return how code calls the method; None: by its full name only."""
        return self.called_as if "called_as" in self.model_fields_set else name_of(self.method)

    def answer(self) -> StubResult:
        """Return the answer."""
        if self.raises is not None:
            return Raised(error_type=self.raises.type, message=self.raises.message)
        if self.stops is not None:
            return Stopped(stop=_stop_of(self.stops))
        return Returned(value=plain_json.dump(self.value))


class CaseProgram(_Part):
    """One program; ``calls`` are in the order in which it made them, which is not checked."""

    code: str
    seed: str = Field(pattern=_HEX)
    readings: str = Field("", pattern=_READINGS)
    calls: tuple[CaseCall, ...] = ()
    #: Name of the stop type.
    ends: str
    output: str = ""

    @model_validator(mode="after")
    def _ends_as_programs_do(self) -> Self:
        _stop_of(self.ends)
        return self


class Case(_Part):
    """The programs of a turn. Each begins with the variables of the one before."""

    version: Literal[1] = _VERSION
    chat_key: str = Field(min_length=1, max_length=200)
    #: Of the interpreter: decides the order of sets.
    hash_seed: int = Field(0, ge=0, lt=1 << 32)
    keeps_variables: bool = False
    programs: tuple[CaseProgram, ...]

    # A least length of the field would count valid programs only: a faulty one would be a missing one too.
    @model_validator(mode="after")
    def _has_a_program(self) -> Self:
        if not self.programs:
            raise ValueError("programs is empty: a case has at least one")
        return self

    def recordings(self) -> list[Recording]:
        """Return what a replayer runs."""
        return [self._recording(number, program) for number, program in enumerate(self.programs, start=1)]

    def _recording(self, number: int, program: CaseProgram) -> Recording:
        next_id = _new_ids(program.seed)
        calls = {
            next_id(call.method, plain_json.dump(call.arguments)): RecordedCall(
                path=call.method, called_as=call.short_name(), type=call.type, answer=call.answer()
            )
            for call in program.calls
        }
        return Recording(
            number=number,
            chat_key=self.chat_key,
            code=program.code,
            seed=program.seed,
            readings=program.readings,
            new_ids=lambda: _new_ids(program.seed),
            calls=calls,
            stop_type=_stop_of(program.ends),
            output=program.output,
        )


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """How a case went."""

    path: Path
    programs: list[ProgramReplay] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether each program did what it must."""
        return not any(program.differences for program in self.programs)


def case_of(
    recordings: Sequence[Recording],
    replays: Sequence[ProgramReplay],
    *,
    hash_seed: int,
    keeps_variables: bool,
    redact: Callable[[str], str],
) -> Case:
    """Return the case of programs whose replays are the same.

    Args:
        recordings: at least one.
        hash_seed, keeps_variables: those of the replays.
        redact: removes secrets and host paths from all texts.
    """
    recorded = zip(recordings, replays, strict=True)
    return Case(
        chat_key=redact(recordings[0].chat_key),
        hash_seed=hash_seed,
        keeps_variables=keeps_variables,
        programs=tuple(_program_of(recording, replay, redact) for recording, replay in recorded),
    )


def write_case(case: Case, path: Path) -> None:
    """Write a case to a new file.

    Raises:
        UsageError: the file exists, cannot be written, or has another ending than ``find_cases`` looks for.
    """
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"a case is a file that ends in {' or '.join(_SUFFIXES)}, and not {path}")
    data = case.model_dump(mode="json", exclude_unset=True, exclude={"version"})
    text = _HEAD + yaml.dump(
        {"version": _VERSION, **data},
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=None,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already; remove it, or save the case under another name") from None
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}") from exc


def find_cases(paths: Iterable[Path]) -> list[Path]:
    """Return the files of cases: those named, and of directories all that end in .yaml or .yml.

    Raises:
        UsageError: there is no such file or directory, or a directory has none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(one for one in path.rglob("*") if one.suffix in _SUFFIXES and one.is_file())
        if not inside:
            raise UsageError(f"{path} has no case: no file that ends in .yaml")
        found += inside
    return list(dict.fromkeys(found))


def read_case(path: Path) -> Case:
    """Read the case of a file.

    Raises:
        UsageError: the file cannot be read, is no case, or is of a newer version.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as exc:
        raise UsageError(f"cannot read the case {path}: {exc.strerror}") from exc
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path} is no case: it has more than {_MOST_BYTES:,} bytes")
    try:
        content = yaml.load(data, Loader=_LOADER)  # noqa: S506 - a safe one
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as exc:
        first = str(exc).replace("\n", " ")
        raise UsageError(f"{path} is no case: it is not YAML: {first}") from exc
    if _is_larger(content, 2 * len(data) + _ALIASED_BYTES):
        raise UsageError(f"{path} is no case: what its aliases refer to is without end or too large")
    version = content.get("version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise UsageError(f"{path} is no case: it has no `version`; `nekro replay TURN --save` writes one")
    if version > _VERSION:
        raise UsageError(
            f"{path} is a case of version {version}, and this release reads up to {_VERSION}; upgrade it"
        )
    try:
        return Case.model_validate(content)
    except (ValidationError, RecursionError) as exc:
        raise UsageError(f"{path} is no valid case: {_faults(exc)}") from exc


async def run_cases(settings: Settings, paths: Sequence[Path]) -> list[CaseResult]:
    """Run the cases of files, in a sandbox of this process.

    Raises:
        UsageError: a file is no case; none was run.
        SandboxError: a program could not be run.
    """
    cases = {path: read_case(path) for path in paths}
    results: dict[Path, CaseResult] = {}
    groups: dict[tuple[int, bool], list[Path]] = {}
    for path, case in cases.items():
        groups.setdefault((case.hash_seed, case.keeps_variables), []).append(path)
    for (seed, keeps), members in groups.items():
        sandbox = settings.sandbox.model_copy(update={"keep_variables": keeps})
        with tempfile.TemporaryDirectory(prefix="nekro-eval-") as directory:
            replayer = open_replayer(
                sandbox,
                directory=Path(directory) / "areas",
                packages_dir=settings.data_dir / "layers",
                hash_seed=seed,
            )
            async with replayer as running:
                for path in members:
                    programs = await running.replay(cases[path].recordings())
                    results[path] = CaseResult(path=path, programs=programs)
    return [results[path] for path in paths]


def _stop_of(name: str) -> StopType:
    try:
        return StopType[name]
    except KeyError:
        raise ValueError(f"{name!r} is none of {', '.join(stop.name for stop in StopType)}") from None


def _new_ids(seed: str) -> NextId:
    """Return ids that depend on what the arguments are, and not on how they are written."""
    ids = CallIds(seed)

    def next_id(path: str, arguments: bytes) -> str:
        # Arguments of a program that does not write JSON are known by their bytes.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.dumps(plain_json.load(arguments), sort_keys=True).encode()
        return ids.next(path, arguments)

    return next_id


def _program_of(recording: Recording, replay: ProgramReplay, redact: Callable[[str], str]) -> CaseProgram:
    calls = []
    for made in replay.made:
        if made.recorded is None or made.recorded.answer is None:
            continue  # the replay is not the same
        calls.append(
            CaseCall(
                method=made.path,
                type=made.recorded.type,
                arguments=_clean(plain_json.load(made.arguments), redact),
                **_named(made.recorded),
                **_written(made.recorded.answer, redact),
            )
        )
    return CaseProgram(
        code=redact(recording.code),
        seed=recording.seed,
        readings=recording.readings,
        calls=tuple(calls),
        ends=replay.stop_type.name,
        output=redact(replay.output),
    )


def _named(call: RecordedCall) -> dict[str, Any]:
    return {} if call.called_as == call.name else {"called_as": call.called_as}


def _written(answer: StubResult, redact: Callable[[str], str]) -> dict[str, Any]:
    match answer:
        case Returned(value=value):
            return {"value": _clean(plain_json.load(value), redact)}
        case Raised(error_type=error_type, message=message):
            return {"raises": CaseError(type=error_type, message=redact(message))}
        case Stopped(stop=stop):
            return {"stops": stop.name}


def _clean(value: Any, redact: Callable[[str], str]) -> Any:
    """Redact each text of JSON data by itself, as JSON may write the characters of a secret otherwise."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact(name): _clean(item, redact) for name, item in value.items()}
    if isinstance(value, list):
        return [_clean(item, redact) for item in value]
    return value


def _is_larger(content: Any, most: int) -> bool:
    """Whether data with its aliases written out would have more than so many values and characters."""
    left, rest = most, [content]
    while rest and left >= 0:
        value = rest.pop()
        left -= 1 + (len(value) if isinstance(value, str | bytes) else 0)
        if isinstance(value, Mapping):
            rest += (*value.keys(), *value.values())
        elif isinstance(value, list):
            rest += value
    return left < 0


def _faults(exc: ValidationError | RecursionError) -> str:
    if isinstance(exc, RecursionError):
        return "it is nested too deeply"
    found = exc.errors(include_url=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}" for one in found[:5])


_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


#: Line breaks of YAML that a reader would turn into spaces or line feeds.
_BREAKS: Final = re.compile("[\r\x85\u2028\u2029]")


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values each time, so that they can be edited."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _BREAKS.search(text) else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
