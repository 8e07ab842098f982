"""Limits that are the same in every installation: no variable sets them.

Each group of settings inherits those that its readers need. A test constructs a group with other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

__all__ = [
    "AgentLimits",
    "BrokerLimits",
    "BudgetWarnings",
    "DatabaseLimits",
    "DownloadLimits",
    "GatewayLimits",
    "LLMLimits",
    "McpLimits",
    "RetentionLimits",
    "SandboxLimits",
    "SettingGroup",
    "StoreLimits",
    "UploadLimits",
    "WorkerLimits",
    "fixed_fields",
]


class SettingGroup(BaseModel):
    """A frozen group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def fixed_fields(group: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields that a group of settings inherits from its limits; no variable sets them."""
    return getattr(group.__base__, "model_fields", {})


class BrokerLimits(SettingGroup):
    """Of ``BrokerSettings``."""

    #: How long a delivery may stay unacknowledged and unrenewed before it is redelivered.
    visibility_timeout_seconds: float = 30
    #: Maximum number of calls that wait in one queue, or in one process for their chat's turn; more are
    #: refused. 0 means no limit.
    max_queued: int = 10_000
    #: Concurrent calls of one chat in one process; more wait for their turn.
    calls_per_chat: int = 64


class DatabaseLimits(SettingGroup):
    """Of ``DatabaseSettings``."""

    #: How long to wait for a free connection, and a SQLite writer for another one.
    pool_timeout_seconds: float = 15
    #: Time limit of a transaction; then its connection is closed and it fails.
    transaction_timeout_seconds: float = 30


class RetentionLimits(SettingGroup):
    """Of ``RetentionSettings``."""

    #: Outcomes of calls, including dead-lettered ones; repeated deliveries need them.
    calls_days: float = 7
    #: What rounds sent to the model (``NEKRO_AGENT__KEEP_PROMPTS``); at most as long as rounds.
    prompts_days: float = 7


class BudgetWarnings(SettingGroup):
    """Of ``BudgetSettings``."""

    #: A chat is warned, once per period, when it has used this share of a budget; 1 means no warning.
    warn_at: float = 0.8


class McpLimits(SettingGroup):
    """Of ``McpSettings``."""

    #: Largest message of a server; the call that a larger one answers fails.
    message_bytes: int = 8 << 20
    #: How often the tools of servers with a URL are listed again.
    refresh_seconds: float = 300
    #: A worker ends its session with a server with a URL when it was idle for this time.
    idle_seconds: float = 300


class StoreLimits(SettingGroup):
    """Of ``StoreSettings``."""

    #: Largest value in UTF-8 bytes; a larger one is an error.
    max_value_bytes: int = 16 << 20


class DownloadLimits(SettingGroup):
    """Of ``DownloadSettings``."""

    #: Longest time without data from the server before an attempt fails.
    timeout_seconds: float = 60
    #: Connections to one server for one file of at least 64 MiB.
    connections: int = 4


class UploadLimits(SettingGroup):
    """Of ``UploadSettings``."""

    #: Maximum number of files and directories in the uploads of one chat.
    chat_names: int = 2_000


class SandboxLimits(SettingGroup):
    """Of ``SandboxSettings``."""

    #: Size of ``/tmp``, and of ``/dev/shm``.
    tmp_bytes: int = 64 << 20
    #: Maximum number of files in ``/app/shared``.
    shared_files: int = 2000
    #: Output that is kept (head and tail); a run that writes 16 times as much is killed.
    output_keep_bytes: int = 64 << 10
    #: Largest arguments of one call.
    argument_bytes: int = 1 << 20
    #: Largest return value of one call.
    return_bytes: int = 8 << 20
    #: Plugin calls of one run at the same time.
    max_calls_in_flight: int = 8
    #: ``/app/shared`` is emptied when it was idle for this time; 0 keeps it.
    shared_idle_seconds: float = 1800
    #: Most bytes of the kept variables of one turn.
    keep_variables_bytes: int = 256 << 10
    #: Simple index for wheels; unset means the index that pip is configured with.
    package_index: str | None = None
    #: First of the 10,000 host user ids for sandboxes when the service is root.
    uid_range_start: int = 200_000


class LLMLimits(SettingGroup):
    """Of ``LLMSettings``."""

    #: How closely the model looks at images; other groups of models have a setting for it.
    image_detail: Literal["auto", "low", "high"] = "auto"
    #: Longest wait for the first token.
    first_token_timeout_seconds: float = 60
    #: Requests per round before it fails.
    tries: int = 3
    #: Longest pause between two pieces of a streamed answer.
    idle_timeout_seconds: float = 60


class AgentLimits(SettingGroup):
    """Of ``AgentSettings``."""

    #: Newest messages shown to the LLM.
    history_messages: int = 32
    #: Tokens of the model's context that a prompt leaves to the answer, at most half of it.
    answer_tokens: int = 4096
    #: Tokens of history shown, at most a quarter of the prompt; the newest message is always shown. A
    #: message that is longer than a fifth is cut in the middle.
    history_tokens: int = 6000
    #: Tokens shown of one result of a method, one output of a program or what one plugin adds to prompts,
    #: at most an eighth of the prompt. A longer one is cut in the middle.
    observation_tokens: int = 4000
    #: Tokens of a prompt's list of plugins and methods, at most two fifths of the prompt. A longer list
    #: shows in full only what the chat used lately, and the other methods by name with one line each. 0:
    #: as long as the prompt allows.
    catalogue_tokens: int = 12_000
    #: Largest picture in a prompt; a larger one is made smaller.
    image_bytes: int = 1 << 20
    #: Longest side of a picture in a prompt in pixels; 512 with detail ``low``. A longer one is made
    #: smaller.
    image_side: int = 2048
    #: Largest file that is made a picture of a prompt; others are named.
    image_file_bytes: int = 16 << 20
    #: Pixels of a picture before it is made smaller; others are named. Decoding may use 12 bytes of memory
    #: per pixel, and 256 MiB.
    image_pixels: int = 40_000_000
    #: Most pictures in a prompt, with those of results.
    prompt_images: int = 16
    #: Most bytes of all pictures in a prompt.
    prompt_image_bytes: int = 8 << 20
    #: Most tokens of all pictures in a prompt, as OpenAI counts them: 85 with detail ``low``, else up to
    #: 1,445 for one.
    prompt_image_tokens: int = 20_000
    #: Newest pictures of people's messages that a model with ``NEKRO_LLM__VISION`` sees; prompts only name
    #: the others.
    history_images: int = 4


class WorkerLimits(SettingGroup):
    """Of ``WorkerSettings``."""

    #: Niceness of work in lane ``long`` (see nice(1)).
    long_nice: int = 5


class GatewayLimits(SettingGroup):
    """Of ``GatewaySettings``."""

    #: Largest body of a request, except of uploads and routes of plugins.
    body_bytes: int = 2 << 20
    #: Largest body of an upload of files.
    upload_bytes: int = 1 << 30
    #: Largest body of a message, which may contain pictures and files. A file of a message in the SSE
    #: adapter protocol may have two thirds of it, in either direction.
    media_bytes: int = 48 << 20
    #: How long a client may take to send a request's headers, and then its body.
    body_seconds: float = 30
    #: Connections at the same time in one process; more are answered with 503.
    connections: int = 4000
    #: Streams that one key may have open in one process; more are answered with 429. 0 does not limit
    #: them.
    streams_per_key: int = 3000
    #: Largest body of a request to a route of a plugin.
    plugin_body_bytes: int = 32 << 20
    #: Largest body of a webhook that plugins receive.
    webhook_body_bytes: int = 512 << 10
    #: How long a plugin may take to begin an answer, and between two parts of it; also the time limit of a
    #: webhook.
    plugin_seconds: float = 30
    #: Longest answer of a route of a plugin; then it is cut.
    plugin_stream_seconds: float = 3600
    #: Requests to the routes of one plugin at the same time in one gateway.
    plugin_requests: int = 64
    #: Attempts to deliver an event to a webhook's URL; then it is a dead letter. The first pause is 5 s,
    #: each further one four times as long, up to 12 h.
    webhook_attempts: int = 10
