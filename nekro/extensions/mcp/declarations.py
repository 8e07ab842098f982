"""Declarations of MCP servers: entries of ``mcp.json`` as other hosts write them, and our own key ``nekro``.

A secret is named, not written: ``${NAME}`` in a value is replaced with a variable of the worker's environment
when the server starts or a request is sent, and ``${NAME:-default}`` with the default if it is not set.
Variables of the fleet itself, ``NEKRO_…``, are refused: who declares a server must not read the signing key.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from broker_config.secret_files import refuse_secret_path
from nekro_agent.errors import InvalidValueError

__all__ = [
    "Access",
    "Declaration",
    "OAuth",
    "Sampling",
    "ServerLimits",
    "check_name",
    "module_names",
    "parse",
    "referenced",
    "resolve",
    "without_references",
]

Access = Literal["ro", "rw"]

#: A default ends at the next reference at the latest, so that a text is read once.
_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-((?:(?!\$\{)[^}])*))?\}")
_NAME: Final = re.compile(r"[A-Za-z0-9@][A-Za-z0-9@._/ -]{0,63}")
_MOST_BYTES: Final = 64 << 10
_OF_FLEET: Final = "NEKRO_"


#: It would end an argument of bubblewrap and begin another one.
_HAS_NUL: Final = "a value contains a NUL character"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class OAuth(_Part):
    """OAuth with credentials of this system (grant ``client_credentials``)."""

    #: The authorization server that gave the credentials; they are sent to no other.
    issuer: str
    client_id: str
    client_secret: str
    scope: str | None = None


class Sampling(_Part):
    """What a server may ask of a language model."""

    #: Group of models, as plugins name it.
    group: str = "default"
    #: Longest answer.
    max_tokens: int = Field(1_000, ge=1, le=1_000_000)
    #: Tokens of requests and answers in one day (UTC), of all workers together.
    tokens_per_day: int = Field(100_000, ge=1)


class ServerLimits(_Part):
    """Our own settings of one server: the key ``nekro``."""

    #: Whether a stdio server has the network of the worker's host.
    network: bool = False
    #: Files and directories of the host that a stdio server sees, at the same paths.
    files: dict[str, Access] = {}
    #: Longest call of a tool; None: the limit of the call's lane.
    timeout_seconds: float | None = Field(None, gt=0)
    #: Which tools need approval: all, none, or those whose names match a pattern; None: those that do not
    #: declare that they only read.
    approval: bool | tuple[str, ...] | None = None
    memory_bytes: int = Field(1 << 30, ge=32 << 20)
    max_processes: int = Field(128, ge=4, le=4096)
    #: None: the server gets no answers of a model.
    sampling: Sampling | None = None
    #: How long a question of the server waits for a person; None: the server may not ask.
    elicitation_seconds: float | None = Field(None, gt=0, le=86_400)
    oauth: OAuth | None = None

    @field_validator("files")
    @classmethod
    def _absolute(cls, files: dict[str, Access]) -> dict[str, Access]:
        for path in files:
            if "\0" in path:
                raise ValueError(_HAS_NUL)
            if not Path(path).is_absolute() or ".." in Path(path).parts or Path(path) == Path("/"):
                raise ValueError(f"{path!r} must be an absolute path below / without ..")
        return files


def _no_linker_variables(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name[:60]!r} is not a valid variable name")
        # They would act on the program that drops the rights of root, before it does.
        if name.startswith("LD_"):
            raise ValueError(
                f"the variable {name} is not allowed; start the program by a script that sets it"
            )
    return env


class Declaration(_Part):
    """One server: a command that is started (stdio), or a URL (streamable HTTP)."""

    command: str | None = None
    args: tuple[str, ...] = ()
    env: Annotated[dict[str, str], AfterValidator(_no_linker_variables)] = {}
    url: str | None = None
    headers: dict[str, str] = {}
    nekro: ServerLimits = ServerLimits()

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("it needs either `command` (stdio) or `url` (streamable HTTP)")
        if self.url is not None:
            if not re.match(r"(?i)https?://[^/]|\$\{", self.url):
                raise ValueError("`url` must begin with http:// or https://")
            if self.args or self.env or self.nekro.network or self.nekro.files:
                raise ValueError("`args`, `env`, `network` and `files` are for servers with a command")
        else:
            if not (self.command or "").strip():
                raise ValueError("`command` is empty")
            if self.headers or self.nekro.oauth is not None:
                raise ValueError("`headers` and `oauth` are for servers with a URL")
        return self

    @model_validator(mode="after")
    def _no_secrets_of_the_fleet(self) -> Self:
        for text in self.texts():
            if "\0" in text:
                raise ValueError(_HAS_NUL)
            for match in _REFERENCE.finditer(text):
                if fault := _refused_variable(match[1]):
                    raise ValueError(fault)
        return self

    @property
    def is_stdio(self) -> bool:
        """Whether it is started as a process."""
        return self.command is not None

    def to_json(self) -> str:
        """Return the canonical JSON text; equal declarations have equal texts."""
        return json.dumps(
            self.model_dump(mode="json", exclude_defaults=True), sort_keys=True, separators=(",", ":")
        )

    @property
    def digest(self) -> str:
        """Identifies the declaration."""
        return hashlib.sha256(self.to_json().encode("utf-8", "surrogatepass")).hexdigest()

    def texts(self) -> Iterable[str]:
        """Return every text that may contain references."""
        oauth = self.nekro.oauth
        own = () if oauth is None else (oauth.issuer, oauth.client_id, oauth.client_secret)
        return (
            self.command or "",
            *self.args,
            *self.env.values(),
            self.url or "",
            *self.headers.values(),
            *own,
        )


#: Keys of other hosts without a meaning here; any other unknown key is an error.
_IGNORED: Final = frozenset({
    "type", "transport", "disabled", "enabled", "autoApprove", "alwaysAllow", "description", "name", "cwd",
    "timeout", "startup_timeout_sec", "tool_timeout_sec", "icon",
})  # fmt: skip


def parse(name: str, entry: object, *, secrets: Mapping[Path, str] | None = None) -> tuple[Declaration, bool]:
    """Return the declaration of an entry of ``mcpServers``, and whether the entry enables it.

    Args:
        secrets: paths of this host that no server may see (``secret_paths``); None: another host
            checks them.

    Raises:
        InvalidValueError: it is not a declaration; the message names the server and each fault.
    """
    check_name(name)
    if not isinstance(entry, Mapping):
        raise InvalidValueError(f"MCP server {name!r}: its declaration must be an object")
    transport = str(entry.get("type") or entry.get("transport") or "").lower()
    if transport == "sse":
        raise InvalidValueError(
            f"MCP server {name!r}: the transport sse was replaced by streamable HTTP in 2025 and is not "
            "supported; give the server's streamable HTTP address as `url`"
        )
    known = {str(key): value for key, value in entry.items() if key not in _IGNORED}
    try:
        if len(json.dumps(known)) > _MOST_BYTES:
            raise InvalidValueError(f"MCP server {name!r}: its declaration has more than {_MOST_BYTES} bytes")
        declaration = Declaration.model_validate(known)
    except ValidationError as exc:
        raise InvalidValueError(f"MCP server {name!r}: {_faults(exc)}") from None
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidValueError(f"MCP server {name!r}: its declaration is no JSON value: {exc}") from None
    for path in declaration.nekro.files:
        try:
            refuse_secret_path(Path(path), secrets or {})
        except InvalidValueError as exc:
            raise InvalidValueError(f"MCP server {name!r}: nekro.files: {exc}") from None
    return declaration, entry.get("enabled") is not False and entry.get("disabled") is not True


def check_name(name: str) -> None:
    """Refuse a name that cannot be shown and cannot become a module.

    Raises:
        InvalidValueError: as said.
    """
    if not _NAME.fullmatch(name):
        raise InvalidValueError(
            f"MCP server {name[:80]!r}: a name has 1 to 64 letters, digits and @ . _ / - or spaces, and "
            "begins with a letter, a digit or @"
        )


def module_names(names: Iterable[str]) -> dict[str, str]:
    """Return the module name of each server, an identifier; of equal ones the later are numbered."""
    modules: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names):
        base = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_") or "server"
        base = f"_{base}" if base[0].isdigit() else base
        module, number = base, 2
        while module in taken:
            module, number = f"{base}_{number}", number + 1
        taken.add(module)
        modules[name] = module
    return modules


def resolve(text: str, *, name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace the references of a text.

    Raises:
        InvalidValueError: a variable without a default is not set, or one is of the fleet; the message names
            it.
    """

    def value(match: re.Match[str]) -> str:
        if fault := _refused_variable(match[1]):
            raise InvalidValueError(f"MCP server {name!r}: {fault}")
        found = environ.get(match[1]) or match[2]
        if found is None:
            raise InvalidValueError(
                f"MCP server {name!r} needs the variable {match[1]}, which the environment of the worker "
                "lacks; set it there and start the worker again"
            )
        return found

    return _REFERENCE.sub(value, text)


def _refused_variable(variable: str) -> str | None:
    """Return why a reference is refused. Settings are read from variables in any case."""
    if not variable.upper().startswith(_OF_FLEET):
        return None
    return (
        f"the variable {variable} is not passed to servers, because {_OF_FLEET}… are those of the fleet; "
        "give the value to the workers in a variable with another name"
    )


def without_references(text: str) -> str:
    """Return what a text contains besides references."""
    return _REFERENCE.sub("", text)


def referenced(text: str) -> list[str]:
    """Return the values that the references of a text have now; unset ones are left out."""
    found = (os.environ.get(match[1]) or match[2] for match in _REFERENCE.finditer(text))
    return [value for value in found if value]


def _faults(exc: ValidationError) -> str:
    parts = []
    for error in exc.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in error["loc"])
        parts.append(f"{where}: {error['msg']}" if where else str(error["msg"]))
    return "; ".join(parts)
