"""Forms in which settings are given: files, budgets, and names of earlier releases.

``NEKRO_DATABASE__URL_FILE=/run/secrets/url`` reads a setting from a file: container engines provide secrets
as files, which unlike variables do not appear in process listings or in ``docker inspect``. A budget, which
is what one scope may use, is written as ``tokens=100000,cost=0.5``. A process whose environment still names
a setting of an earlier release ends with an error that says what replaced it.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode

from nekro_agent.errors import SettingsError

__all__ = [
    "FILE_SUFFIX",
    "MEASURES",
    "REMOVED_SETTINGS",
    "BudgetLimits",
    "EnvironmentSource",
    "named_by_file",
    "read_setting_files",
    "renamed_group",
]

FILE_SUFFIX: Final = "_FILE"

_MAX_BYTES: Final = 64 << 10


def named_by_file(name: str, known: Collection[str]) -> bool:
    """Whether an upper-case variable is ``<a setting>_FILE``."""
    return name.endswith(FILE_SUFFIX) and name.removesuffix(FILE_SUFFIX) in known


def read_setting_files(environ: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Read the files that variables name; returns setting to content without trailing line breaks.

    Raises:
        SettingsError: a file cannot be read or is too large, or a setting is set in both ways.
    """
    values = {}
    names = {name.upper(): name for name in environ}
    for upper, name in names.items():
        if not named_by_file(upper, known) or not environ[name]:
            continue
        setting = upper.removesuffix(FILE_SUFFIX)
        if setting in names:
            raise SettingsError(f"{setting} and {upper} are both set; keep one of them")
        values[setting] = _content(upper, Path(environ[name]))
    return values


def _content(variable: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"{variable}: cannot read {path}: {reason}") from exc
    if len(data) > _MAX_BYTES:
        raise SettingsError(f"{variable}: {path} has more than {_MAX_BYTES} bytes; is it the right file?")
    return text.rstrip("\r\n")


class EnvironmentSource(EnvSettingsSource):
    """The environment, with ``_FILE`` variables replaced by the contents of their files."""

    def __init__(self, settings_cls: type[BaseSettings], *, known: Collection[str]) -> None:
        """Read the environment.

        Args:
            known: upper-case names of every setting's variable.
        """
        self._known = known
        super().__init__(settings_cls)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        named = {
            name: value for name, value in os.environ.items() if not named_by_file(name.upper(), self._known)
        }
        values = named | read_setting_files(os.environ, self._known)
        return {name.lower(): value for name, value in values.items()}


#: What budgets measure, with the unit that people read.
MEASURES: Final[Mapping[str, str]] = {
    "tokens": "tokens",
    "cost": "cost",
    "rounds": "rounds",
    "sandbox_seconds": "seconds of running code",
}


def _limits(value: object) -> object:
    if isinstance(value, str):
        pairs = [part.strip() for part in value.split(",") if part.strip()]
        names = [pair.partition("=")[0].strip() for pair in pairs]
        if len(set(names)) < len(names):
            raise ValueError("a measure is named twice")
        value = {name: pair.partition("=")[2].strip() for name, pair in zip(names, pairs, strict=True)}
    if not isinstance(value, Mapping):
        raise ValueError("write it as tokens=100000,cost=0.5")
    limits = {str(name): _limit(str(name), given) for name, given in value.items()}
    return {name: limits[name] for name in MEASURES if limits.get(name)}


def _limit(name: str, given: object) -> float:
    if name not in MEASURES:
        near = difflib.get_close_matches(name, MEASURES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(MEASURES)}"
        raise ValueError(f"{name!r} is not a measure; {hint}")
    try:
        number = float(str(given))
    except ValueError:
        raise ValueError(f"{name}={given} is not a number") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}={given} must be at least 0 and finite; 0 does not limit")
    return number


#: Limits by measure, in the order of ``MEASURES``; what is missing is not limited.
BudgetLimits = Annotated[Mapping[str, float], NoDecode, BeforeValidator(_limits)]


_OLD_GROUPS: Final = "NEKRO_MODEL_GROUPS"
#: Values of old model groups whose name changed, too.
_OLD_VALUES: Final = {
    "TYPE": "EMBEDDING=true, or DRAW=true",
    "TEMPERATURE": 'PARAMETERS as JSON: {"temperature": 0.5}',
    "TOP_P": 'PARAMETERS as JSON: {"top_p": 0.5}',
    "EXTRA_BODY": "PARAMETERS",
}

#: What replaces each, or the value that is now fixed.
REMOVED_SETTINGS: Final = {
    "NEKRO_BROKER__SENTINEL_USERNAME": "the Sentinels are asked as their default user",
    "NEKRO_BROKER__CONNECT_TIMEOUT_SECONDS": "NEKRO_BROKER__SOCKET_TIMEOUT_SECONDS: connecting may take 40 %",
    "NEKRO_RESULTS__EXPIRES_SECONDS": "results are kept for an hour",
    "NEKRO_DATABASE__BUSY_TIMEOUT_SECONDS": "NEKRO_DATABASE__POOL_TIMEOUT_SECONDS",
    "NEKRO_RETENTION__JOBS_DAYS": "NEKRO_RETENTION__ROUNDS_DAYS",
    "NEKRO_RETENTION__REQUESTS_DAYS": "answers to requests with an `Idempotency-Key` are kept for a day",
    "NEKRO_STORE__WARN_VALUE_BYTES": "values from 1 MiB on are logged",
    "NEKRO_STORE__MAX_KEY_CHARS": "keys may have 1024 characters",
    "NEKRO_PLUGINS__PACKAGE_INSTALL": "NEKRO_PLUGINS__PACKAGE_ALLOW: `*` allows every package, empty none",
    "NEKRO_DOWNLOADS__PARALLEL_MIN_BYTES": "NEKRO_DOWNLOADS__CONNECTIONS=1 fetches no file in parts",
    "NEKRO_DOWNLOADS__TRIES": "five attempts without new data fail",
    "NEKRO_DOWNLOADS__RETRY_SECONDS": "attempts are 1, 2, 4 and 8 s apart",
    "NEKRO_DOWNLOADS__LEASE_SECONDS": "NEKRO_AGENT__LEASE_SECONDS",
    "NEKRO_DOWNLOADS__KEEP_PARTIAL_DAYS": "unfinished downloads are kept for 3 days",
    "NEKRO_SANDBOX__CONTAINER_ENGINE": "the first of docker and podman on PATH is used",
    "NEKRO_SANDBOX__CALL_SECONDS": "a call has the time limit of its method's lane",
    "NEKRO_SANDBOX__MAX_OPEN_FILES": "a process may have 256 open files",
    "NEKRO_SANDBOX__SHM_BYTES": "NEKRO_SANDBOX__TMP_BYTES, which limits `/tmp` and `/dev/shm`",
    "NEKRO_SANDBOX__OUTPUT_KILL_BYTES": "NEKRO_SANDBOX__OUTPUT_KEEP_BYTES, of which a run may write 16 times",
    "NEKRO_SANDBOX__MAX_REFUSED_CALLS": "NEKRO_SANDBOX__MAX_CALLS: as many calls may be refused",
    "NEKRO_SANDBOX__GUARD_SECONDS": "a guard may be 5 s late",
    "NEKRO_SANDBOX__PACKAGE_INSTALL": "NEKRO_SANDBOX__PACKAGE_ALLOW: `*` allows every package, empty none",
    "NEKRO_SANDBOX__UID_RANGE_SIZE": "NEKRO_SANDBOX__UID_RANGE_START: 10000 user ids from there are used",
    "NEKRO_LLM__FALLBACK_MODEL": "NEKRO_LLM__FALLBACKS, with the model as a group of NEKRO_MODELS",
    "NEKRO_LLM__CONNECT_TIMEOUT_SECONDS": "connecting may take 5 s",
    "NEKRO_LLM__BACKOFF_SECONDS": "the pause before the second attempt is about 1 s",
    "NEKRO_AGENT__ROUNDS_PER_DRAIN": "NEKRO_AGENT__ROUNDS_PER_TURN",
    "NEKRO_AGENT__MAX_ATTEMPTS": "NEKRO_BROKER__MAX_DELIVERIES",
    "NEKRO_AGENT__SWEEP_SECONDS": "NEKRO_AGENT__LEASE_SECONDS: the sweep runs three times in it",
    "NEKRO_AGENT__UNCLAIMED_SECONDS": "NEKRO_AGENT__LEASE_SECONDS: a call waits for two thirds of it",
    "NEKRO_AGENT__HISTORY_CHARS": "NEKRO_AGENT__HISTORY_TOKENS: about a quarter as many tokens of English",
    "NEKRO_AGENT__CATALOGUE_CHARS": "NEKRO_AGENT__CATALOGUE_TOKENS: about a quarter as many tokens",
    "NEKRO_AGENT__MESSAGE_CHARS": "NEKRO_AGENT__HISTORY_TOKENS: one message may use a fifth of it",
    "NEKRO_AGENT__OUTPUT_CHARS": "NEKRO_AGENT__OBSERVATION_TOKENS",
    "NEKRO_WORKERS__PINNED_LEASE_SECONDS": "NEKRO_AGENT__LEASE_SECONDS",
    "NEKRO_WORKERS__LONG_WAIT_SECONDS": "code does not wait for calls with an effect in lane `long`",
    "NEKRO_WORKERS__TASK_EVENTS": "workers publish task events while a tool reads them",
    "NEKRO_WORKERS__BLOCK_WARN_SECONDS": "an event loop that is blocked for 0.5 s is reported",
    "NEKRO_WORKERS__BLOCK_EXIT_SECONDS": (
        "NEKRO_AGENT__LEASE_SECONDS: a method may block for that long beyond its deadline"
    ),
    "NEKRO_GATEWAY__SSE_FILE_BYTES": "NEKRO_GATEWAY__MEDIA_BYTES, of which a file may have two thirds",
    "NEKRO_GATEWAY__WEBHOOK_RETRY_SECONDS": "NEKRO_GATEWAY__WEBHOOK_ATTEMPTS: the first pause is 5 s",
}


def renamed_group(name: str) -> str | None:
    """Return what replaces a variable of the old model groups, in upper case; None for every other name."""
    if name != _OLD_GROUPS and not name.startswith(f"{_OLD_GROUPS}__"):
        return None
    group, _, leaf = name.removeprefix(_OLD_GROUPS).rpartition("__")
    return f"NEKRO_MODELS{group}__{_OLD_VALUES.get(leaf, leaf)}" if leaf else "NEKRO_MODELS"
