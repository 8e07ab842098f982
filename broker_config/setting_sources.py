"""Forms of settings: files, budgets, and names of earlier releases.

``NEKRO_DATABASE__URL_FILE=/run/secrets/url`` reads a setting from a file: container engines provide secrets
as files, which unlike variables do not appear in process listings or in ``docker inspect``. A budget, which
is what one scope may use, is written as ``tokens=100000,cost=0.5``. A process whose environment still names
a setting of an earlier release ends with an error that says what replaced it, or, if the setting is a
constant now, logs a warning and ignores it.
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
    "FIXED_SETTINGS",
    "FIXED_SINCE",
    "MEASURES",
    "REMOVED_SETTINGS",
    "BudgetLimits",
    "EnvironmentSource",
    "is_fixed",
    "named_by_file",
    "read_setting_files",
    "renamed_group",
]

FILE_SUFFIX: Final = "_FILE"
#: Release that made the ``FIXED_SETTINGS`` constants.
FIXED_SINCE: Final = "0.3"

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
            name: value
            for name, value in os.environ.items()
            if not named_by_file(name.upper(), self._known) and not is_fixed(name)
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
    "NEKRO_DATABASE__BUSY_TIMEOUT_SECONDS": "a writer of SQLite waits 15 s for another one",
    "NEKRO_RETENTION__JOBS_DAYS": "NEKRO_RETENTION__ROUNDS_DAYS",
    "NEKRO_RETENTION__REQUESTS_DAYS": "answers to requests with an `Idempotency-Key` are kept for a day",
    "NEKRO_STORE__WARN_VALUE_BYTES": "values from 1 MiB on are logged",
    "NEKRO_STORE__MAX_KEY_CHARS": "keys may have 1024 characters",
    "NEKRO_PLUGINS__PACKAGE_INSTALL": "NEKRO_PLUGINS__PACKAGE_ALLOW: `*` allows every package, empty none",
    "NEKRO_DOWNLOADS__PARALLEL_MIN_BYTES": "files of at least 64 MiB are fetched in parts",
    "NEKRO_DOWNLOADS__TRIES": "five attempts without new data fail",
    "NEKRO_DOWNLOADS__RETRY_SECONDS": "attempts are 1, 2, 4 and 8 s apart",
    "NEKRO_DOWNLOADS__LEASE_SECONDS": "NEKRO_AGENT__LEASE_SECONDS",
    "NEKRO_DOWNLOADS__KEEP_PARTIAL_DAYS": "unfinished downloads are kept for 3 days",
    "NEKRO_SANDBOX__CONTAINER_ENGINE": "the first of docker and podman on PATH is used",
    "NEKRO_SANDBOX__CALL_SECONDS": "a call has the time limit of its method's lane",
    "NEKRO_SANDBOX__MAX_OPEN_FILES": "a process may have 256 open files",
    "NEKRO_SANDBOX__SHM_BYTES": "`/tmp` and `/dev/shm` have 64 MiB each",
    "NEKRO_SANDBOX__OUTPUT_KILL_BYTES": "a run that writes 1 MiB of output is killed",
    "NEKRO_SANDBOX__MAX_REFUSED_CALLS": "a run is ended after 200 refused calls",
    "NEKRO_SANDBOX__GUARD_SECONDS": "a guard may be 5 s late",
    "NEKRO_SANDBOX__PACKAGE_INSTALL": "NEKRO_SANDBOX__PACKAGE_ALLOW: `*` allows every package, empty none",
    "NEKRO_SANDBOX__UID_RANGE_SIZE": "10000 user ids are used",
    "NEKRO_LLM__FALLBACK_MODEL": "NEKRO_LLM__FALLBACKS, with the model as a group of NEKRO_MODELS",
    "NEKRO_LLM__CONNECT_TIMEOUT_SECONDS": "connecting may take 5 s",
    "NEKRO_LLM__BACKOFF_SECONDS": "the pause before the second attempt is about 1 s",
    "NEKRO_AGENT__ROUNDS_PER_DRAIN": "NEKRO_AGENT__ROUNDS_PER_TURN",
    "NEKRO_AGENT__MAX_ATTEMPTS": "NEKRO_BROKER__MAX_DELIVERIES",
    "NEKRO_AGENT__SWEEP_SECONDS": "NEKRO_AGENT__LEASE_SECONDS: the sweep runs three times in it",
    "NEKRO_AGENT__UNCLAIMED_SECONDS": "NEKRO_AGENT__LEASE_SECONDS: a call waits for two thirds of it",
    "NEKRO_AGENT__HISTORY_CHARS": "a quarter of NEKRO_AGENT__PROMPT_TOKENS, at most 6,000, shows the history",
    "NEKRO_AGENT__CATALOGUE_CHARS": "two fifths of NEKRO_AGENT__PROMPT_TOKENS, at most 12,000, list methods",
    "NEKRO_AGENT__MESSAGE_CHARS": "one message may use a fifth of the tokens of the history",
    "NEKRO_AGENT__OUTPUT_CHARS": "an eighth of NEKRO_AGENT__PROMPT_TOKENS, at most 4,000, shows one output",
    "NEKRO_WORKERS__PINNED_LEASE_SECONDS": "NEKRO_AGENT__LEASE_SECONDS",
    "NEKRO_WORKERS__LONG_WAIT_SECONDS": "code does not wait for calls with an effect in lane `long`",
    "NEKRO_WORKERS__TASK_EVENTS": "workers publish task events while a tool reads them",
    "NEKRO_WORKERS__BLOCK_WARN_SECONDS": "an event loop that is blocked for 0.5 s is reported",
    "NEKRO_WORKERS__BLOCK_EXIT_SECONDS": (
        "NEKRO_AGENT__LEASE_SECONDS: a method may block for that long beyond its deadline"
    ),
    "NEKRO_GATEWAY__SSE_FILE_BYTES": "a file may have 32 MiB",
    "NEKRO_GATEWAY__WEBHOOK_RETRY_SECONDS": "the first pause is 5 s, each further one four times as long",
}


#: Settings that a process ignores since ``FIXED_SINCE``, with a warning in its log: what holds instead.
FIXED_SETTINGS: Final = {
    "NEKRO_AGENT__TOOL_CALL_SHARE": "the calls of all turns are kept as events",
    "NEKRO_DATABASE__POOL_TIMEOUT_SECONDS": "a connection is waited for 15 s",
    "NEKRO_DATABASE__TRANSACTION_TIMEOUT_SECONDS": "a transaction may take 30 s",
    "NEKRO_BROKER__VISIBILITY_TIMEOUT_SECONDS": "a delivery that is not renewed for 30 s is delivered again",
    "NEKRO_BROKER__MAX_QUEUED": "10,000 calls may wait in a queue",
    "NEKRO_BROKER__CALLS_PER_CHAT": "64 calls of one chat run at the same time in one process",
    "NEKRO_RETENTION__CALLS_DAYS": "outcomes of calls are kept for 7 days",
    "NEKRO_RETENTION__EVENTS_DAYS": "NEKRO_RETENTION__ROUNDS_DAYS",
    "NEKRO_RETENTION__PROMPTS_DAYS": "prompts are kept for 7 days, at most NEKRO_RETENTION__ROUNDS_DAYS",
    "NEKRO_BUDGETS__WARN_AT": "a chat is warned at 80 % of a budget",
    "NEKRO_MCP__START_SECONDS": "NEKRO_PLUGINS__START_SECONDS",
    "NEKRO_MCP__MESSAGE_BYTES": "a message of a server may have 8 MiB",
    "NEKRO_MCP__REFRESH_SECONDS": "the tools of servers with a URL are listed every 300 s",
    "NEKRO_MCP__IDLE_SECONDS": "an idle session with a server with a URL ends after 300 s",
    "NEKRO_STORE__MAX_VALUE_BYTES": "a value may have 16 MiB",
    "NEKRO_DOWNLOADS__TIMEOUT_SECONDS": "an attempt without data for 60 s fails",
    "NEKRO_DOWNLOADS__CONNECTIONS": (
        "a large file is fetched over 4 connections where its server permits ranges"
    ),
    "NEKRO_UPLOADS__CHAT_NAMES": "a chat may have 2,000 files and directories in its uploads",
    "NEKRO_SANDBOX__TMP_BYTES": "`/tmp` and `/dev/shm` have 64 MiB each",
    "NEKRO_SANDBOX__SHARED_FILES": "`/app/shared` may have 2,000 files",
    "NEKRO_SANDBOX__OUTPUT_KEEP_BYTES": (
        "64 KiB of output are kept; a run that writes 16 times as much is killed"
    ),
    "NEKRO_SANDBOX__ARGUMENT_BYTES": "the arguments of a call may have 1 MiB",
    "NEKRO_SANDBOX__RETURN_BYTES": "a return value may have 8 MiB",
    "NEKRO_SANDBOX__MAX_CALLS_IN_FLIGHT": "a run may have 8 plugin calls at the same time",
    "NEKRO_SANDBOX__WARM_SECONDS": "a sandbox starts when its code is there",
    "NEKRO_SANDBOX__SHARED_IDLE_SECONDS": "`/app/shared` is emptied after 1,800 s without a run",
    "NEKRO_SANDBOX__KEEP_VARIABLES_BYTES": "256 KiB of variables are kept per turn",
    "NEKRO_SANDBOX__PACKAGE_INDEX": (
        "the index that pip is configured with (`PIP_INDEX_URL`, `pip.conf`) serves wheels"
    ),
    "NEKRO_SANDBOX__UID_RANGE_START": "sandboxes of a service that is root use the user ids 200000 to 209999",
    "NEKRO_LLM__FIRST_TOKEN_TIMEOUT_SECONDS": (
        "the first token may take 60 s; a group of NEKRO_MODELS has FIRST_TOKEN_SECONDS"
    ),
    "NEKRO_LLM__IDLE_TIMEOUT_SECONDS": (
        "a streamed answer may pause for 60 s; a group of NEKRO_MODELS has IDLE_SECONDS"
    ),
    "NEKRO_LLM__TRIES": "a model is asked 3 times, then its fallbacks",
    "NEKRO_LLM__TEMPERATURE": 'NEKRO_LLM__PARAMETERS as JSON: {"temperature": 0.5}',
    "NEKRO_LLM__IMAGE_DETAIL": "`auto`; a group of NEKRO_MODELS has IMAGE_DETAIL",
    "NEKRO_AGENT__HISTORY_MESSAGES": "prompts show the newest 32 messages",
    "NEKRO_AGENT__ANSWER_TOKENS": (
        "a prompt leaves 4,096 tokens of the model's context to the answer, at most half of it"
    ),
    "NEKRO_AGENT__HISTORY_TOKENS": (
        "a quarter of NEKRO_AGENT__PROMPT_TOKENS, at most 6,000, shows the history"
    ),
    "NEKRO_AGENT__OBSERVATION_TOKENS": (
        "an eighth of NEKRO_AGENT__PROMPT_TOKENS, at most 4,000, shows one result"
    ),
    "NEKRO_AGENT__CATALOGUE_TOKENS": (
        "two fifths of NEKRO_AGENT__PROMPT_TOKENS, at most 12,000, list the methods"
    ),
    "NEKRO_AGENT__IMAGE_BYTES": "a picture of a prompt has at most 1 MiB",
    "NEKRO_AGENT__IMAGE_SIDE": "a picture of a prompt is at most 2,048 pixels long",
    "NEKRO_AGENT__IMAGE_FILE_BYTES": "files of up to 16 MiB become pictures of prompts",
    "NEKRO_AGENT__IMAGE_PIXELS": "pictures of up to 40,000,000 pixels are decoded",
    "NEKRO_AGENT__PROMPT_IMAGES": "a prompt has at most 16 pictures",
    "NEKRO_AGENT__PROMPT_IMAGE_BYTES": "the pictures of a prompt have at most 8 MiB",
    "NEKRO_AGENT__PROMPT_IMAGE_TOKENS": (
        "the pictures of a prompt cost at most 20,000 tokens, and a quarter of the prompt"
    ),
    "NEKRO_AGENT__HISTORY_IMAGES": "a model sees the newest 4 pictures of people's messages",
    "NEKRO_WORKERS__LONG_NICE": "work in lane `long` has niceness 5",
    "NEKRO_GATEWAY__BODY_BYTES": "the body of a request may have 2 MiB",
    "NEKRO_GATEWAY__UPLOAD_BYTES": "an upload may have 1 GiB",
    "NEKRO_GATEWAY__MEDIA_BYTES": "a message with pictures and files may have 48 MiB",
    "NEKRO_GATEWAY__BODY_SECONDS": "a client may take 30 s for the headers and 30 s for the body",
    "NEKRO_GATEWAY__CONNECTIONS": "a gateway takes 4,000 connections",
    "NEKRO_GATEWAY__STREAMS_PER_KEY": "a key may have 3,000 streams open in one gateway",
    "NEKRO_GATEWAY__PLUGIN_BODY_BYTES": "the body of a request to a plugin's route may have 32 MiB",
    "NEKRO_GATEWAY__WEBHOOK_BODY_BYTES": "the body of a webhook may have 512 KiB",
    "NEKRO_GATEWAY__PLUGIN_SECONDS": "a plugin may take 30 s to begin an answer, and between two parts of it",
    "NEKRO_GATEWAY__PLUGIN_STREAM_SECONDS": "an answer of a plugin's route is cut after an hour",
    "NEKRO_GATEWAY__PLUGIN_REQUESTS": "a gateway passes on 64 requests to one plugin at the same time",
    "NEKRO_GATEWAY__WEBHOOK_ATTEMPTS": "an event is sent to a webhook 10 times, over about a day and a half",
}


def is_fixed(name: str) -> bool:
    """Whether a variable, in any case, names a setting that is a constant now, or a file for it."""
    return name.upper().removesuffix(FILE_SUFFIX) in FIXED_SETTINGS


def renamed_group(name: str) -> str | None:
    """Return what replaces a variable of the old model groups, in upper case; None for every other name."""
    if name != _OLD_GROUPS and not name.startswith(f"{_OLD_GROUPS}__"):
        return None
    group, _, leaf = name.removeprefix(_OLD_GROUPS).rpartition("__")
    return f"NEKRO_MODELS{group}__{_OLD_VALUES.get(leaf, leaf)}" if leaf else "NEKRO_MODELS"
