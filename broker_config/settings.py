"""The settings: small frozen groups, read once from ``NEKRO_…`` variables and a ``.env`` file.

There is no global settings object: the composition root loads ``Settings`` and passes groups to
the components that need them. ``docs/reference/settings.md`` is generated from these models.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar
from urllib.parse import urlsplit

from loguru import logger
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from broker_config.limits import (
    AgentLimits,
    BrokerLimits,
    BudgetWarnings,
    DatabaseLimits,
    DownloadLimits,
    GatewayLimits,
    LLMLimits,
    McpLimits,
    RetentionLimits,
    SandboxLimits,
    SettingGroup,
    StoreLimits,
    UploadLimits,
    WorkerLimits,
    fixed_fields,
)
from broker_config.model_groups import (
    GroupNames,
    JsonObject,
    ModelGroups,
    ModelProtocol,
    check_groups,
    group_variables,
)
from broker_config.setting_sources import (
    FILE_SUFFIX,
    FIXED_SETTINGS,
    FIXED_SINCE,
    REMOVED_SETTINGS,
    BudgetLimits,
    EnvironmentSource,
    is_fixed,
    named_by_file,
    renamed_group,
)
from broker_config.urls import (
    AMQP_SCHEMES,
    BUCKET_SCHEMES,
    LIVE_FILES,
    REDIS_SCHEMES,
    files_place,
    is_redis,
    passwords_of,
    redis_address,
    server_name,
    without_drain,
    without_password,
)
from nekro.base.release import extension, extension_names, imported
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import SettingsError

__all__ = [
    "AgentSettings",
    "ApprovalSettings",
    "BrokerSettings",
    "BudgetSettings",
    "DatabaseSettings",
    "DownloadSettings",
    "GatewaySettings",
    "LLMSettings",
    "LogSettings",
    "McpSettings",
    "MetricsSettings",
    "PluginAccess",
    "PluginSettings",
    "QdrantSettings",
    "ResultSettings",
    "RetentionSettings",
    "SandboxSettings",
    "SecuritySettings",
    "Settings",
    "StoreSettings",
    "UploadSettings",
    "WorkerSettings",
    "known_variables",
]

G = TypeVar("G", bound=SettingGroup)

ENV_PREFIX = "NEKRO_"
#: Variables with this prefix configure the test suite and are not settings.
TEST_PREFIX = "NEKRO_TEST_"
#: Of `nekro_client` and commands over a gateway.
CLIENT_VARIABLES: Final = frozenset({"NEKRO_URL", "NEKRO_KEY"})
#: Least time limit of a connection attempt: a lost packet is sent again after 1 s.
CONNECT_SECONDS: Final = 2.0


def _split_list(value: object) -> object:
    """Convert ``"a,b"`` from the environment to ``["a", "b"]``; other values are returned unchanged."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


#: A list that is written as ``a,b,c`` in the environment.
CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)]
#: As ``nekro.plugins.data_dirs.DirectoryPolicy``; a plugin that uses no directory needs none.
_DIRECTORY_POLICIES: Final = ("local", "synced", "pinned")
#: The value of ``extensions`` that stands for none of them.
_NO_EXTENSIONS: Final = "none"


def _check_extensions(names: tuple[str, ...]) -> tuple[str, ...]:
    known = [*extension_names(), _NO_EXTENSIONS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ValueError(f"{name!r} is not an extension; {hint}")
    return names


PathList = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split_list)]


def _broker_url(url: str) -> str:
    scheme = urlsplit(url).scheme
    if scheme not in REDIS_SCHEMES | AMQP_SCHEMES:
        fault = f"{scheme}:// is not supported" if scheme else "it has no scheme"  # the rest may be a secret
        raise ValueError(f"{fault}; write redis://host:6379/0, rediss://…, sentinel://… or amqp://…")
    return url


def _check_partitions(urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in map(without_drain, urls):
        scheme = urlsplit(url).scheme
        if not is_redis(url):
            fault = (
                f"{scheme}:// is not a Redis" if scheme else "a URL has no scheme"
            )  # the rest may be a secret
            raise ValueError(f"{fault}; write redis://host:6379/0, rediss://… or sentinel://…")
        if fragment := urlsplit(url).fragment:
            raise ValueError(f"a URL ends with #{fragment}; write #drain, or nothing")
        redis_address(url)
    return urls


class BrokerSettings(BrokerLimits):
    """The message broker."""

    url: Annotated[str, AfterValidator(_broker_url)] | None = Field(
        None,
        description="Broker URL (`redis://`, `rediss://` over TLS, `sentinel://`, `amqp://`); unset means an "
        "embedded Redis in the data directory.",
    )
    partitions: Annotated[CommaList, AfterValidator(_check_partitions)] = Field(
        (),
        description="URLs of further Redis servers (`redis://b:6379/0,redis://c:6379/0`): each serves a "
        "share of the chats, chosen by a hash of the chat key, and the server of `URL` the rest. With "
        "`#drain` at the end of one, workers take what is left there, and nothing new is sent to it. All "
        "processes need the same.",
    )
    sentinel_master: str = Field(
        "mymaster",
        description="Name of the primary in Sentinel's configuration, for a URL that names Sentinels "
        "(`sentinel://host:26379;sentinel://host2:26379/0`).",
    )
    sentinel_password: SecretStr | None = Field(
        None,
        description="Password of the Sentinels' default user; the server's user and password are in the URL.",
    )
    tls_ca_file: Path | None = Field(
        None,
        description="CA certificate that signed the certificates of Redis and Sentinels (`rediss://`, "
        "`sentinels://`); unset means the CAs that the machine trusts.",
    )
    tls_cert_file: Path | None = Field(None, description="Client certificate for Redis; unset means none.")
    tls_key_file: Path | None = Field(
        None, description="Private key of that certificate; unset means it is in the same file."
    )
    tls_check_hostname: bool = Field(
        True, description="Whether the certificate of Redis must match the host of the URL."
    )
    key_prefix: str = Field(
        "nekro:", description="Prefix of every Redis key of the broker and of our own keys."
    )
    socket_timeout_seconds: float = Field(
        5,
        gt=0,
        description="Time limit of one request to Redis, and of an answer of RabbitMQ to a process that "
        "sends; a connection attempt has 40 %, at least 2 s.",
    )
    max_deliveries: int = Field(
        3,
        ge=1,
        description="Deliveries after which a task that no worker finishes is dead-lettered, and starts "
        "after which a round whose worker died before the LLM answered fails, with a notice in its chat.",
    )

    @model_validator(mode="after")
    def _name_each_server_once(self) -> Self:
        if not self.partitions:
            return self
        if self.url is None or not is_redis(self.url):
            stated = "unset" if self.url is None else without_password(self.url)
            raise ValueError(
                f"PARTITIONS needs a Redis in URL, which is {stated}; set NEKRO_BROKER__URL to the first "
                "Redis server, or unset NEKRO_BROKER__PARTITIONS"
            )
        names = [server_name(url) for url in (self.url, *self.partitions)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"URL and PARTITIONS name {name} more than once; each server is one partition, and the "
                    "server of URL is the first: name each once"
                )
        return self

    @property
    def connect_seconds(self) -> float:
        """Time limit of one connection attempt; short, so that a dead Sentinel costs little of a request."""
        return max(CONNECT_SECONDS, 0.4 * self.socket_timeout_seconds)


class ResultSettings(SettingGroup):
    """The result backend."""

    url: str | None = Field(
        None, description="Redis URL of the result backend; unset means the broker's Redis."
    )


class DatabaseSettings(DatabaseLimits):
    """The database."""

    url: str | None = Field(
        None,
        description="`postgresql://…` (behind pgbouncer in transaction mode with `?pool_mode=transaction`) "
        "or `sqlite:///path`; unset means SQLite in the data directory.",
    )
    pool_size: int = Field(10, ge=1, le=200, description="Connections kept per process (PostgreSQL).")
    sqlite_synchronous: Literal["normal", "full"] = Field(
        "normal",
        description="`normal`: a SQLite commit survives a crash of any process; `full`: also a power loss, "
        "at the cost of one fsync per commit.",
    )
    key_bytes: int = Field(
        10 << 30,
        ge=0,
        description="Bytes that one key of the HTTP API may keep stored, in rows and files, unless it has a "
        "limit of its own (`nekro keys`); 0 does not limit it. All hosts need the same.",
    )


class RetentionSettings(RetentionLimits):
    """How long ended rows and uploaded files are kept; the sweep deletes older ones."""

    approvals_days: float = Field(
        90, ge=1, description="Decided requests for approval of calls; they say who permitted what."
    )
    rounds_days: float = Field(
        30,
        ge=1,
        description="Rounds of the LLM, with prompt sizes and code; events of chats, from which streams "
        "resume; background jobs and fired timers.",
    )
    messages_days: float = Field(0, ge=0, description="Messages of chats; 0 keeps them forever.")
    audit_days: float = Field(
        0, ge=0, description="Records of administrative acts over the API; 0 keeps them forever."
    )
    uploads_days: float = Field(
        30,
        ge=0,
        description="Files in the uploads of chats, after their last change; 0 keeps them forever.",
    )


class ApprovalResume(StrEnum):
    """What goes on after a decision on a call."""

    PROGRAM = "program"
    MODEL = "model"


class ApprovalSettings(SettingGroup):
    """Which calls a person must approve before they run."""

    require: CommaList = Field(
        (),
        description="Patterns of methods (`author.module.*`, in the form of `fnmatch`) whose calls a person "
        "must approve, besides those whose plugins say so. All hosts need the same: a worker refuses a call "
        "that requires approval by its own settings and has none.",
    )
    exempt: CommaList = Field(
        (),
        description="Patterns of methods whose calls need no approval, whatever `REQUIRE` and plugins say.",
    )

    approvers: CommaList = Field(
        (),
        description="Who may decide with `/approve` and `/deny` in a chat: patterns of `ISSUER:user_id`. "
        "The issuer is the component that vouches for the user's id: `sse` for the SSE adapter, `key:ID` for "
        "a key of the API, `gateway` for the local key. Empty: no approver; the shell and the API "
        "decide.",
    )
    resume: ApprovalResume = Field(
        ApprovalResume.PROGRAM,
        description="What a decision continues: `program`: the program that made the call, at its line, "
        "without a request to the model; `model`: the model is asked, and reads the result.",
    )
    pending_seconds: float = Field(
        86400, gt=0, description="How long a call waits for a decision; then it does not run any more."
    )

    grant_seconds: float = Field(
        28800,
        gt=0,
        description="How long an approval for a turn or a chat permits further calls of the same method.",
    )

    def may_decide(self, issuer: str, user_id: str) -> bool:
        """Whether a person of a chat may decide on its calls."""
        return any(fnmatchcase(f"{issuer}:{user_id}", pattern) for pattern in self.approvers)

    def requires(self, method: str, *, declared: bool) -> bool:
        """Whether calls of a method require approval.

        Args:
            method: full name, ``author.module.function``.
            declared: whether its plugin says so.
        """
        if any(fnmatchcase(method, pattern) for pattern in self.exempt):
            return False
        return declared or any(fnmatchcase(method, pattern) for pattern in self.require)


class BudgetSettings(BudgetWarnings):
    """What rounds, runs of code and plugins' requests to models may use before they are refused.

    A limit is written as `tokens=100000,cost=0.5,rounds=40,sandbox_seconds=600`, with the measures that are
    limited; 0 does not limit. All hosts need the same.
    """

    turn: BudgetLimits = Field({}, description="What one turn may use.")
    chat: BudgetLimits = Field({}, description="What one chat may use in a day (UTC).")
    user: BudgetLimits = Field(
        {}, description="What the turns of one person may use in a day, over all chats of an adapter."
    )
    key: BudgetLimits = Field(
        {},
        description="What the turns that one key of the HTTP API started may use in a day; limits of the key "
        "itself (`nekro keys`) replace it.",
    )
    day: BudgetLimits = Field({}, description="What the whole system may use in a day.")


class PluginSettings(SettingGroup):
    """Which plugins are loaded."""

    dirs: PathList = Field(
        (), description="Folders with plugins, comma-separated; the shipped ones are loaded first."
    )
    disabled: CommaList = Field(
        (), description="Plugin keys (`author.module`) that are loaded but offer no methods."
    )
    load_shipped: bool = Field(True, description="Whether the plugins of `plugin_pkgs` are loaded.")
    start_seconds: float = Field(
        30,
        gt=0,
        description="How long a worker that starts waits for the import or the init of one plugin, and how "
        "long an MCP server may take to start and to list its tools. A slower plugin is left out until that "
        "has ended; `nekro plugins` lists it as `starting`.",
    )
    reload: bool = Field(
        False, description="Whether workers import a plugin again when its files change; for development."
    )
    keep_awake: CommaList = Field(
        (),
        description="Patterns of plugin keys that never sleep, although they declare `allow_sleep` or "
        "`sleep_brief`; `*` keeps all awake.",
    )
    package_allow: CommaList = Field(
        ("*",),
        description="Packages that `dynamic_import_pkg` may install for plugins, by distribution name; `*` "
        "allows all, empty none.",
    )


class McpSettings(McpLimits):
    """Servers of the Model Context Protocol as plugins."""

    file: Path | None = Field(
        None,
        description='File that declares MCP servers (`{"mcpServers": {…}}`); unset means `mcp.json` in the '
        "data directory, if there is one. A server that is declared there and by `nekro mcp add` is as the "
        "file says.",
    )
    allow_unconfined: bool = Field(
        False,
        description="Start servers with a command without isolation where bubblewrap does not work; else "
        "they do not start there.",
    )


class StoreSettings(StoreLimits):
    """Limits of the plugin key-value store."""


class DownloadSettings(DownloadLimits):
    """Limits of downloads by URL."""

    max_bytes: int = Field(20 << 30, ge=1, description="Largest download in bytes.")
    allow_private: CommaList = Field(
        (),
        description="Hosts or networks (CIDR) that are allowed although private, loopback or link-local; "
        "also for what MCP servers name in OAuth.",
    )


#: Variables of providers of buckets whose values are secrets.
_BUCKET_SECRETS: Final = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_TOKEN", "GOOGLE_SERVICE_ACCOUNT_KEY",
)  # fmt: skip


def _check_files_url(url: str) -> str:
    try:
        place = files_place(url)
    except SettingsError as exc:
        raise ValueError(str(exc)) from None
    if place.scheme in BUCKET_SCHEMES and find_spec("obstore") is None:
        raise ValueError("a bucket needs obstore; install it with `pip install 'nekro-workers[objects]'`")
    return url


def _check_plugin_dirs(items: tuple[str, ...]) -> tuple[str, ...]:
    for item in items:
        key, _, policy = (part.strip() for part in item.partition("="))
        if not key or policy not in _DIRECTORY_POLICIES:
            known = ", ".join(_DIRECTORY_POLICIES)
            raise ValueError(f"{item!r} is not author.module=POLICY; the policies are {known}")
    return items


class FileSettings(SettingGroup):
    """Where the files of chats, sandboxes and plugins are kept."""

    url: Annotated[str, AfterValidator(_check_files_url)] = Field(
        LIVE_FILES,
        description="`file://`: in the data directory, which all hosts of a fleet must share; or a bucket: "
        "`s3://bucket/prefix`, `gs://…`, `az://…` (extra `objects`), with the variables of the provider for "
        "credentials, region and endpoint (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, …). Then hosts share no "
        "disk, and all need the same.",
    )
    cache_bytes: int = Field(
        10 << 30,
        ge=1 << 20,
        description="Contents of a bucket that a host keeps on its disk, in bytes; those that were "
        "not used for longest are removed. A file must fit.",
    )
    plugin_dirs: Annotated[CommaList, AfterValidator(_check_plugin_dirs)] = Field(
        (),
        description="With a bucket, what becomes of plugins' data directories, where `nekro plugins` shows "
        "another choice than you want: `author.module=POLICY`, comma-separated. `synced`: brought before a "
        "call and stored after it; `pinned`: one worker of the fleet runs the plugin and stores its files; "
        "`local`: each host has its own. All hosts need the same.",
    )

    @property
    def in_store(self) -> bool:
        """Whether the contents are objects of a store; otherwise files of the data directory."""
        return self.url != LIVE_FILES


class UploadSettings(UploadLimits):
    """Limits of the uploads of one chat (`/app/uploads`)."""

    chat_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        description="Maximum size of the uploads of one chat in bytes; a file counts by its size or its disk "
        "blocks, whichever is larger. A file that would exceed it is refused with an error to the plugin.",
    )


class SandboxSettings(SandboxLimits):
    """How code of the LLM is isolated and limited."""

    driver: Literal["auto", "bwrap", "container", "landlock", "unsafe"] = Field(
        "auto",
        description="`auto` uses bubblewrap; the degraded `landlock` and `unsafe` must be set explicitly.",
    )
    python: Path | None = Field(
        None, description="Interpreter inside the sandbox; unset means the one that runs this process."
    )
    container_image: str = Field(
        "python:3.11-slim",
        description="Image of the container driver; its packages are available in the sandbox.",
    )
    container_runtime: str | None = Field(
        None,
        description="OCI runtime of the container driver, such as `runsc`; unset means the engine's own.",
    )
    wall_seconds: float = Field(
        60, gt=0, description="Time limit of a run, including waits for plugin calls."
    )
    cpu_seconds: int = Field(30, ge=1, description="CPU time of one process of a run.")
    memory_bytes: int = Field(512 << 20, ge=64 << 20, description="Memory of all processes of a run.")
    max_processes: int = Field(64, ge=1, description="Processes and threads of a run.")
    max_file_bytes: int = Field(32 << 20, ge=1 << 20, description="Largest single file that a run can write.")
    shared_bytes: int = Field(256 << 20, ge=1 << 20, description="Disk that `/app/shared` may use.")
    shared_storage: Literal["directory", "image"] = Field(
        "directory",
        description="`image` puts each `/app/shared` on an ext4 image of that size, enforced by the kernel: "
        "for a service that is root, has a local data directory and shares its mounts with its other lanes.",
    )
    require_kernel_limits: bool = Field(
        False,
        description="Refuse to start where a limit on memory, swap, processes, CPU, disk, inodes or file "
        "size is only polled or not enforced.",
    )
    max_calls: int = Field(
        200,
        ge=1,
        description="Plugin calls of one run. A run with more refused calls than that (over the limit, "
        "unknown or too large) is ended.",
    )
    max_concurrent: int = Field(4, ge=1, description="Runs at the same time in one process.")
    fork_server: bool = Field(
        True,
        description="Fork sandboxes from processes that have the interpreter and the packages loaded, where "
        "the kernel allows it; else each is started by bubblewrap.",
    )
    preload: CommaList = Field((), description="Modules that each sandbox imports before its code.")
    packages_dir: Path | None = Field(
        None,
        description="Directory of the packages that every sandbox can import (`nekro sandbox packages`); "
        "unset means `share/nekro/packages` of the environment that runs this process.",
    )
    figures: Literal["send", "save", "off"] = Field(
        "send",
        description="Figures of matplotlib that are open at the end of a run, or at `plt.show()`: `save` "
        "writes them to `/app/shared`, `send` also sends them to the chat.",
    )
    keep_variables: bool = Field(
        False,
        description="Keep top-level variables of plain values, arrays and data frames for the next program "
        "of the same turn.",
    )
    package_allow: CommaList = Field(
        (),
        description="Packages that sandboxed code may request with `dynamic_importer`, by distribution name; "
        "`*` allows all, empty none.",
    )


class LLMSettings(LLMLimits):
    """The language model."""

    base_url: str | None = Field(None, description="Endpoint of the model, up to `/v1`.")
    protocol: ModelProtocol = Field(
        "openai",
        description="Protocol of the endpoint: `openai` (chat completions), `anthropic` (messages), `gemini` "
        "(generateContent).",
    )
    api_key: SecretStr | None = Field(None, description="API key of the endpoint.")
    model: str = Field("", description="Model name.")
    script: Path | None = Field(
        None, description="Replay answers from this YAML file instead of asking an endpoint."
    )
    record: Path | None = Field(None, description="Append each request, as JSON lines, to this file.")
    stream: bool = Field(True, description="Ask for streamed answers.")
    vision: bool = Field(
        True, description="Whether the model sees pictures of messages; else prompts only name their files."
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="Longest answer in tokens; unset means the endpoint's default."
    )
    timeout_seconds: float = Field(180, gt=0, description="Time limit of one complete answer.")
    parameters: JsonObject = Field(
        None, description='Further values of requests, as a JSON object: `{"temperature": 0.5}`.'
    )
    proxy: str | None = Field(None, description="HTTP proxy for requests to the endpoint.")
    context_tokens: int | None = Field(
        None, ge=1, description="Longest context of the model in tokens; unset means unknown."
    )
    fallbacks: GroupNames = Field(
        (), description="Model groups that are asked in this order if this model fails, as `a,b`."
    )
    input_price_per_million: float = Field(
        0, ge=0, description="Price of a million prompt tokens, for the cost figures."
    )
    cached_input_price_per_million: float | None = Field(
        None,
        ge=0,
        description="Price of a million prompt tokens from the endpoint's cache; unset: as other ones.",
    )
    output_price_per_million: float = Field(
        0, ge=0, description="Price of a million answer tokens, for the cost figures."
    )


class QdrantSettings(SettingGroup):
    """The vector database of plugins."""

    url: str | None = Field(
        None,
        description="Qdrant server (`http://host:6333`); unset means an embedded database in the data "
        "directory, which the processes of this host use in turns. Plugins that connect themselves need a "
        "server.",
    )
    api_key: SecretStr | None = Field(None, description="API key of the server.")


class AnswerMode(StrEnum):
    """What an answer of the model without a block of code is."""

    #: A message, which is sent to the chat and ends the turn.
    WORDS = "words"
    #: A program, like every answer.
    STRICT = "strict"


class AgentSettings(AgentLimits):
    """Rounds of the agent."""

    persona: str = Field(
        "You are a helpful assistant in this chat.", description="Who the agent is, for the system prompt."
    )
    answers: AnswerMode = Field(
        AnswerMode.WORDS,
        description="`words`: an answer of the model without a block of Python is sent to the chat and ends "
        "the turn. `strict`: every answer is a program, so only methods speak.",
    )
    rounds_per_turn: int = Field(
        8,
        ge=1,
        le=100,
        description="Rounds that one trigger may cause; a worker runs as many of one chat before it lets "
        "others take the chat.",
    )
    journal_bytes: int = Field(
        default=16 << 20,
        ge=0,
        description="answers of calls, and readings of clocks, that a program needs to run again after "
        "its worker died; with more of them its model is asked to look what happened",
    )
    park_seconds: float = Field(
        default=7 * 86400,
        gt=0,
        description="How long after its first line a program may still wait for a job, a time or an answer "
        "(`wait_for_job`, `sleep_until`, `ask_user`); it holds no process meanwhile",
    )
    keep_prompts: bool = Field(
        False,
        description="Whether what each round sends to the model is stored, for the console, "
        "`nekro trace --prompts` and keys with `admin`: up to 100,000 characters, without the secrets of the "
        "settings.",
    )
    turn_seconds: float = Field(1080, gt=0, description="Longest turn (a trigger and its follow-up rounds).")
    prompt_tokens: int = Field(
        64_000,
        ge=1000,
        description="Longest prompt in tokens; shorter for a model whose `CONTEXT_TOKENS` less "
        "4,096 tokens for the answer is less. Whatever does not fit is shortened.",
    )
    summary_group: str | None = Field(
        None,
        description="Model group that summarises messages which no longer fit into the history of a "
        "prompt, in the background; unset: older messages are left out of prompts.",
    )
    debounce_seconds: float = Field(
        0,
        ge=0,
        description="How long a message waits for more messages of its chat before one round answers all; "
        "results of calls do not wait.",
    )
    lease_seconds: float = Field(
        15,
        ge=1,
        description="How long a chat, job, download or pinned plugin stays with a worker that does not renew "
        "its lease. The sweep that recovers lost work runs three times in it.",
    )

    @property
    def sweep_seconds(self) -> float:
        """Interval of the sweep: work of a dead worker waits for its lease and at most a third more."""
        return self.lease_seconds / 3

    @property
    def unclaimed_seconds(self) -> float:
        """How long a recorded call waits before its message is published again if its queue is empty."""
        return 2 * self.sweep_seconds


class WorkerSettings(WorkerLimits):
    """Worker processes and the lanes."""

    methods_concurrency: int = Field(200, ge=1, description="Concurrent calls in one `methods` process.")
    long_concurrency: int = Field(4, ge=1, description="Concurrent calls in one `long` process.")
    rounds_concurrency: int = Field(8, ge=1, description="Concurrent rounds in one `rounds` process.")
    long_methods: CommaList = Field(
        (), description="Patterns (`author.module.function`, `*`) routed to lane `long`."
    )
    pinned_plugins: CommaList = Field((), description="Plugin keys that run on one worker of the fleet.")
    call_timeout_seconds: float = Field(120, gt=0, description="Time limit of a call in lane `methods`.")
    long_timeout_seconds: float = Field(6 * 3600, gt=0, description="Time limit of a call in lane `long`.")
    wait_seconds: float = Field(
        30,
        gt=0,
        description="How long code waits for a call, which then continues as a job; calls of other types "
        "than TOOL in lane `long` do so at once.",
    )
    drain_seconds: float = Field(30, gt=0, description="How long a stopping worker waits for running calls.")
    cleanup_seconds: float = Field(
        20, ge=0, description="Time limit of all cleanup hooks of plugins together when a worker stops."
    )
    http_address: str = Field(
        "127.0.0.1",
        description="Address on which workers serve the HTTP routes of plugins to gateways; `0.0.0.0` for "
        "gateways on other hosts. Each plugin gets a free port.",
    )
    http_advertise: str | None = Field(
        None,
        description="Name or address that gateways reach this host at; unset means `http_address`, or the "
        "address of the host's name if that is `0.0.0.0` or `::`.",
    )

    @property
    def close_seconds(self) -> float:
        """Time limit of the steps of a worker's shutdown after its calls, including cleanup hooks."""
        return self.cleanup_seconds + 2 * CLOSE_STEP_SECONDS

    @property
    def stop_seconds(self) -> float:
        """Time limit of a worker's graceful shutdown; then the worker exits.

        One step more than drain and closing, for acknowledgements, connections and threads.
        """
        return self.drain_seconds + self.close_seconds + CLOSE_STEP_SECONDS


class PluginAccess(StrEnum):
    """Who may use the webhooks, HTTP routes and pages of a plugin."""

    #: No request; the gateway answers as if the plugin did not exist.
    CLOSED = "closed"
    #: Everybody who reaches the gateway; its pages are active documents of the gateway's origin.
    OPEN = "open"
    #: Requests with a key of the gateway that has the scope ``call``.
    KEY = "key"
    #: Everybody, because the plugin checks requests itself; it receives their cookies and authorization.
    PLUGIN = "plugin"


def _check_trace_url(value: str) -> str:
    if value and (urlsplit(value).scheme not in ("http", "https") or "{trace_id}" not in value):
        raise ValueError("has to be a URL with http or https and {trace_id} in it")
    return value


def _check_access(entries: tuple[str, ...]) -> tuple[str, ...]:
    for entry in entries:
        key, _, mode = entry.partition("=")
        if not key or mode not in list(PluginAccess):
            choices = ", ".join(PluginAccess)
            raise ValueError(f"{entry!r} must be author.module=MODE or *=MODE; MODE is one of {choices}")
    return entries


class GatewaySettings(GatewayLimits):
    """The HTTP API."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. One that other hosts reach needs a key (`nekro keys`).",
    )
    port: int = Field(8600, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    socket: Path | None = Field(
        None, description="Unix socket to listen on instead of a port; needs a key (`nekro keys`)."
    )
    allowed_hosts: CommaList = Field(
        (),
        description="Host names that requests may be for, without port. On a loopback address the loopback "
        "names are always allowed. Elsewhere an empty list allows every name.",
    )
    cors_origins: CommaList = Field(
        (),
        description="Origins of web sites (`https://app.example.org`) whose scripts may use the API with a "
        "key; `*` allows all, empty none.",
    )
    requests_per_minute: int = Field(
        600, ge=0, description="Requests per minute of a key that states no rate; 0 does not limit them."
    )
    streams_per_address: int = Field(
        3000,
        ge=0,
        description="Event streams that one address may have open in one gateway; of IPv6, a network of 64 "
        "bits. Behind a proxy all clients have its address: set 0 there. 0 does not limit them.",
    )
    drain_seconds: float = Field(
        10, ge=0, description="How long a stopping gateway waits for running requests; streams end at once."
    )
    plugin_http: Annotated[CommaList, AfterValidator(_check_access)] = Field(
        (),
        description="Who may use the webhooks, HTTP routes and pages of plugins: `author.module=MODE`, "
        "comma-separated; `*` stands for the plugins that are not named. `open`: everybody; `key`: keys with "
        "the scope `call`; `plugin`: everybody, the plugin checks requests itself; `closed`: no request, as "
        "for plugins without an entry.",
    )

    console: bool = Field(
        True,
        description="Whether the console is served at `/console`, and its session cookies are accepted.",
    )

    sse_access_key: SecretStr | None = Field(
        None,
        description="Access key of programs that connect chats over Nekro Agent's SSE adapter protocol "
        "(`/api/adapters/sse/connect`); unset means that it is not served.",
    )

    webhook_allow_private: CommaList = Field(
        (),
        description="Hosts or networks (CIDR) that webhooks may reach although private, loopback or "
        "link-local.",
    )

    @property
    def sse_file_bytes(self) -> int:
        """Largest file of a message in the SSE adapter protocol; base64 makes it a third longer."""
        return self.media_bytes * 2 // 3

    @property
    def has_active_pages(self) -> bool:
        """Whether pages of plugins may act as scripts of the gateway's origin."""
        active = (PluginAccess.OPEN, PluginAccess.PLUGIN)
        return any(PluginAccess(entry.split("=", 1)[1]) in active for entry in self.plugin_http)

    def access_to(self, plugin_key: str) -> PluginAccess:
        """Return who may use the webhooks, routes and pages of a plugin."""
        modes = dict(entry.split("=", 1) for entry in self.plugin_http)
        return PluginAccess(modes.get(plugin_key) or modes.get("*") or PluginAccess.CLOSED)


class SecuritySettings(SettingGroup):
    """Secrets of the installation."""

    signing_key: SecretStr | None = Field(
        None, description="Key that signs invocations; unset means a random one kept in the data directory."
    )


class LogSettings(SettingGroup):
    """Logging."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Lowest level that is written."
    )
    json_lines: bool = Field(False, description="One JSON object per line instead of text.")


class MetricsSettings(SettingGroup):
    """Prometheus metrics and HTTP probes."""

    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of each worker's `/metrics`, `/livez` and `/readyz`; if it is in use, the worker "
        "tries the next one. 0 opens none.",
    )
    address: str = Field("127.0.0.1", description="Address on which workers listen for them.")


class TracingSettings(SettingGroup):
    """OpenTelemetry traces; OpenTelemetry's own variables (`OTEL_…`) configure the exporter."""

    enabled: bool = Field(
        False,
        description="Whether turns and calls are traced; needs the extra `otel` "
        "(`pip install 'nekro-workers[otel]'`).",
    )
    capture_content: bool = Field(
        False,
        description="Whether spans contain prompts, answers, and arguments and results of calls, without the "
        "secrets of the settings; `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true` does the same.",
    )
    url_template: Annotated[str, AfterValidator(_check_trace_url)] = Field(
        "",
        description="Where a turn's trace can be seen, an HTTP URL with `{trace_id}` in it, for "
        "`GET /turns/{id}`; empty: no link.",
    )

    def url_of(self, trace_id: str) -> str | None:
        """Return where a trace can be seen; None if no template is set."""
        return self.url_template.replace("{trace_id}", trace_id) or None


class Settings(BaseSettings):
    """All settings; ``Settings.load()`` is the only way to read the environment."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_nested_max_split=1,
        extra="ignore",
        frozen=True,
        nested_model_default_partial_update=True,
        hide_input_in_errors=True,  # tracebacks show them, and values may be secrets
    )

    data_dir: Path = Field(
        Path("data"), description="Root directory of all data on disk; made absolute when loaded."
    )
    models: ModelGroups = Field(
        {},
        description="Models that chats, fallbacks and plugins choose by name, as JSON: "
        '`{"text-embedding": {"model": "m", "embedding": true}}`. Or one variable per value, with `_` for '
        "`-`: `NEKRO_MODELS__TEXT_EMBEDDING__MODEL`. Group `default` is that of "
        "`NEKRO_LLM__…`. The values are listed under `models`.",
    )
    extensions: Annotated[CommaList, AfterValidator(_check_extensions)] = Field(
        (),
        description="Extensions that processes load: `mcp`, `openai`, `plugin_pages`, `sse_adapter`, "
        "`webhooks`; empty: all of them; `none`: none.",
    )
    broker: BrokerSettings = BrokerSettings()
    results: ResultSettings = ResultSettings()
    database: DatabaseSettings = DatabaseSettings()
    retention: RetentionSettings = RetentionSettings()
    approval: ApprovalSettings = ApprovalSettings()
    budgets: BudgetSettings = BudgetSettings()
    plugins: PluginSettings = PluginSettings()
    mcp: McpSettings = McpSettings()
    store: StoreSettings = StoreSettings()
    downloads: DownloadSettings = DownloadSettings()
    files: FileSettings = FileSettings()
    uploads: UploadSettings = UploadSettings()
    sandbox: SandboxSettings = SandboxSettings()
    llm: LLMSettings = LLMSettings()
    qdrant: QdrantSettings = QdrantSettings()
    agent: AgentSettings = AgentSettings()
    workers: WorkerSettings = WorkerSettings()
    gateway: GatewaySettings = GatewaySettings()
    security: SecuritySettings = SecuritySettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    _is_data_dir_set: bool = PrivateAttr(False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use explicit values first, then the environment and the files it names, then ``.env``."""
        environment = EnvironmentSource(settings_cls, known=_known_names() | group_variables(os.environ))
        if isinstance(dotenv_settings, DotEnvSettingsSource):
            named = dotenv_settings.env_vars
            dotenv_settings.env_vars = {name: value for name, value in named.items() if not is_fixed(name)}
        return init_settings, environment, dotenv_settings

    @classmethod
    def load(cls, *, env_file: Path | None = Path(".env"), **overrides: Any) -> Settings:
        """Read the environment and ``.env``; explicit ``overrides`` take precedence.

        A variable whose setting is a constant now is ignored; the log names it and says what holds.

        Args:
            env_file: None reads no file; a file that does not exist is skipped.

        Raises:
            SettingsError: a ``NEKRO_`` variable is unknown or a value is invalid; the message names
                the variable and the problem, and suggests a similar name for an unknown variable.
        """
        _reject_unknown(os.environ, env_file)
        try:
            settings = _complete()(_env_file=env_file, **overrides)
        except ValidationError as exc:
            raise SettingsError(_explain(exc)) from exc
        except SourceError as exc:  # the only setting that is JSON; the cause does not contain the text
            raise SettingsError(f"NEKRO_MODELS is not valid JSON: {exc.__cause__}") from None
        check_groups(settings)
        _check_shared_storage(settings)
        loaded = settings.model_copy(update={"data_dir": settings.data_dir.expanduser().absolute()})
        loaded._is_data_dir_set = "data_dir" in settings.model_fields_set
        return loaded

    @property
    def is_data_dir_set(self) -> bool:
        """Whether the data directory is stated, also if it is the default one."""
        return self._is_data_dir_set

    def loads_extension(self, name: str) -> bool:
        """Whether processes load an extension."""
        return not self.extensions or name in self.extensions

    def of_extension(self, name: str, group: type[G]) -> G:
        """Return the settings of an extension, ``group`` as it states them; defaults if none were loaded."""
        return getattr(self, name, None) or group()

    @property
    def visibility_timeout(self) -> timedelta:
        """How long an unrenewed delivery stays with its worker."""
        return timedelta(seconds=self.broker.visibility_timeout_seconds)

    def secret_values(self) -> tuple[str, ...]:
        """Every configured secret as plain text, for redaction; never log this."""
        secrets = [secret.get_secret_value() for secret in _secrets_of(self)]
        urls = [
            self.broker.url,
            self.results.url,
            self.database.url,
            self.qdrant.url,
            *self.broker.partitions,
        ]
        urls += [self.llm.base_url, self.llm.proxy]
        urls += [url for group in self.models.values() for url in (group.base_url, group.proxy)]
        passwords = [password for url in urls if url is not None for password in passwords_of(url)]
        of_bucket = [os.environ.get(name, "") for name in _BUCKET_SECRETS] if self.files.in_store else []
        return tuple(secret for secret in (*secrets, *passwords, *of_bucket) if secret)


def _check_shared_storage(settings: Settings) -> None:
    if settings.files.in_store and settings.sandbox.shared_storage == "image":
        raise SettingsError(
            "NEKRO_SANDBOX__SHARED_STORAGE=image keeps shared files in images of one host, but "
            "NEKRO_FILES__URL names a store for the files of all hosts; unset one of them"
        )


def _complete() -> type[Settings]:
    """Return the settings with those of the installed extensions."""
    return _with_groups(tuple(extension_names()))


@cache
def _with_groups(extensions: tuple[str, ...]) -> type[Settings]:
    """Return ``Settings`` with a group for each extension that states one."""
    groups: dict[str, Any] = {}
    for name in extensions:
        stated = extension(name).settings
        if stated is None:
            continue
        if name in Settings.model_fields:
            raise SettingsError(f"Extension {name} states settings under the name of a group of the core")
        group = imported(stated)
        groups[name] = (group, group())
    return create_model("Settings", __base__=Settings, **groups) if groups else Settings


def _secrets_of(value: object) -> Iterator[SecretStr]:
    """Yield every secret of a settings object, so that none is forgotten when a setting is added."""
    if isinstance(value, SecretStr):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _secrets_of(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _secrets_of(item)


def known_variables() -> Iterator[tuple[str, str, Any]]:
    """Yield (environment variable, group or "", field info) of every setting, in reading order."""
    for name, field in _complete().model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, SettingGroup):
            fixed = fixed_fields(group)
            for leaf, info in group.model_fields.items():
                if leaf not in fixed:
                    yield f"{ENV_PREFIX}{name}__{leaf}".upper(), name, info
        else:
            yield f"{ENV_PREFIX}{name}".upper(), "", field


def _known_names() -> set[str]:
    return {variable for variable, _, _ in known_variables()}


def _reject_unknown(environ: Mapping[str, str], env_file: Path | None) -> None:
    known = _known_names()
    names = list(environ)
    if env_file is not None and env_file.is_file():
        lines = env_file.read_text("utf-8").split("\n")
        names += [line.split("=", 1)[0].removeprefix("export ").strip() for line in lines if "=" in line]
    known |= group_variables(names) | CLIENT_VARIABLES
    for name in dict.fromkeys(names):
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or upper.startswith(TEST_PREFIX) or upper in known:
            continue
        if named_by_file(upper, known):
            continue
        if is_fixed(name):
            now = FIXED_SETTINGS[upper.removesuffix(FILE_SUFFIX)]
            logger.bind(variable=name, since=FIXED_SINCE, now=now).warning("removed_setting_ignored")
            continue
        raise SettingsError(f"Unknown setting {name}. {_hint(upper, known)}")


def _hint(name: str, known: set[str]) -> str:
    """Return what to do about an unknown name in upper case."""
    replacement = REMOVED_SETTINGS.get(name.removesuffix(FILE_SUFFIX)) or renamed_group(name)
    if replacement is not None:
        return f"It was removed; unset it. Now: {replacement}."
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]}?" if near else "`nekro doctor --settings` lists every name."


#: Faults of numbers, flags and choices, whose values an error may show.
_PLAIN_FAULTS: Final = frozenset(
    {
        "bool_parsing",
        "float_parsing",
        "greater_than",
        "greater_than_equal",
        "int_from_float",
        "int_parsing",
        "less_than",
        "less_than_equal",
        "literal_error",
    }
)


def _explain(exc: ValidationError) -> str:
    parts = []
    for error in exc.errors(include_url=False):
        variable = ENV_PREFIX + "__".join(str(part) for part in error["loc"]).upper()
        # Others may contain a secret.
        shown = f"; it is {error['input']!r}" if error["type"] in _PLAIN_FAULTS else ""
        parts.append(f"{variable}: {error['msg'].removeprefix('Value error, ')}{shown}")
    return "; ".join(parts)
