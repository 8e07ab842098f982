"""Every error that this project raises deliberately.

    NekroError
    ├── SettingsError
    ├── PluginError
    │   ├── PluginLoadError
    │   ├── PlaceholderUsedError
    │   ├── MethodNotFoundError
    │   ├── MethodDisabledError
    │   ├── ArgumentError
    │   ├── ResultError
    │   ├── InvalidValueError
    │   ├── UploadQuotaError
    │   ├── DownloadError
    │   │   └── DownloadRefusedError
    │   ├── PackageInstallError
    │   ├── MethodFailedError
    │   ├── MethodAbortedError
    │   ├── CallTimeoutError
    │   ├── CallCancelledError
    │   ├── NotApprovedError
    │   │   └── ApprovalDeniedError
    │   ├── WaitRefusedError
    │   └── OutcomeUnknownError
    ├── BrokerError
    │   ├── BrokerUnavailableError
    │   ├── OverloadedError
    │   └── MessageRefusedError
    ├── StorageError
    │   ├── NotFoundError
    │   ├── ConflictError
    │   ├── AlreadyDecidedError
    │   ├── DamagedFileError
    │   ├── FencedError
    │   ├── FilesQuotaError
    │   ├── StorageQuotaError
    │   └── StorageUnavailableError
    ├── SandboxError
    │   ├── SandboxUnavailableError
    │   └── SandboxProtocolError
    ├── LLMError
    │   ├── BudgetExceededError
    │   ├── LLMAccessError
    │   ├── LLMBusyError
    │   ├── LLMContextError
    │   ├── LLMFilterError
    │   ├── LLMNotFoundError
    │   ├── LLMRefusedError
    │   ├── LLMTimeoutError
    │   ├── LLMUnavailableError
    │   ├── LLMUnreadableError
    │   └── ModelGroupError
    ├── ServiceError
    ├── UsageError
    └── RuntimeNotBoundError

Each class has two facts as class attributes: ``code``, a stable word that may cross process
boundaries, and ``retryable``, whether the same request may succeed later without a change by the
caller.

Errors that describe invalid values also subclass ``ValueError`` or ``TypeError``, so that
plugins that catch the built-in types keep working.
"""

from __future__ import annotations

import functools
from typing import ClassVar

__all__ = [
    "AlreadyDecidedError",
    "ApprovalDeniedError",
    "ArgumentError",
    "BrokerError",
    "BrokerUnavailableError",
    "BudgetExceededError",
    "CallCancelledError",
    "CallTimeoutError",
    "ConflictError",
    "DamagedFileError",
    "DownloadError",
    "DownloadRefusedError",
    "FencedError",
    "FilesQuotaError",
    "InvalidValueError",
    "LLMAccessError",
    "LLMBusyError",
    "LLMContextError",
    "LLMError",
    "LLMFilterError",
    "LLMNotFoundError",
    "LLMRefusedError",
    "LLMTimeoutError",
    "LLMUnavailableError",
    "LLMUnreadableError",
    "MessageRefusedError",
    "MethodAbortedError",
    "MethodDisabledError",
    "MethodFailedError",
    "MethodNotFoundError",
    "ModelGroupError",
    "NekroError",
    "NotApprovedError",
    "NotFoundError",
    "OutcomeUnknownError",
    "OverloadedError",
    "PackageInstallError",
    "PlaceholderUsedError",
    "PluginError",
    "PluginLoadError",
    "ResultError",
    "RuntimeNotBoundError",
    "SandboxError",
    "SandboxProtocolError",
    "SandboxUnavailableError",
    "ServiceError",
    "SettingsError",
    "StorageError",
    "StorageQuotaError",
    "StorageUnavailableError",
    "UploadQuotaError",
    "UsageError",
    "WaitRefusedError",
]


class NekroError(Exception):
    """Root of the error tree in the module's docstring."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False


class SettingsError(NekroError):
    """A setting is unknown, out of its bounds or contradicts another, or a plugin needs one that is unset."""

    code = "settings"


class PluginError(NekroError):
    """Base of errors about a plugin or a call of one of its methods."""

    code = "plugin"


class PluginLoadError(PluginError):
    """A plugin file cannot be imported or exposes no usable ``plugin``; the loader records it."""

    code = "plugin_load"


class PlaceholderUsedError(PluginError, AttributeError):
    """A plugin used a name of the reference that does not exist here; raised at first use."""

    code = "placeholder"


class MethodNotFoundError(PluginError, LookupError):
    """No loaded plugin has a method of that name; raised by the catalogue, the bridge and workers."""

    code = "method_not_found"


class MethodDisabledError(PluginError):
    """The method exists, but its plugin is disabled."""

    code = "method_disabled"


class ArgumentError(PluginError, TypeError):
    """Arguments cannot be decoded, are too large, or do not match the method's signature."""

    code = "argument"


class ResultError(PluginError):
    """A method returned a value that cannot be sent to its caller (unpicklable, too large, secret)."""

    code = "result"


class InvalidValueError(PluginError, ValueError):
    """Plugin code passed a key, value, path or name that the SDK does not accept; the message says why."""

    code = "invalid_value"


class UploadQuotaError(PluginError):
    """A file exceeds the quota of a chat's uploads; raised to the plugin by the function that stores it.

    Sizes are in bytes; ``used_…`` excludes a file that would be replaced.
    """

    code = "upload_quota"

    def __init__(
        self,
        *,
        name: str,
        size_bytes: int,
        used_bytes: int,
        limit_bytes: int,
        used_names: int,
        limit_names: int,
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.used_bytes = used_bytes
        self.limit_bytes = limit_bytes
        self.used_names = used_names
        self.limit_names = limit_names
        super().__init__(
            f"{name!r} ({size_bytes} bytes) does not fit into this chat's uploads: they hold {used_bytes} of "
            f"{limit_bytes} bytes (NEKRO_UPLOADS__CHAT_BYTES) and {used_names} of {limit_names} names "
            "of files and directories; delete files, or keep them for a shorter time "
            "(NEKRO_RETENTION__UPLOADS_DAYS)"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the data; Celery replaces an error that cannot be pickled with its nearest base class."""
        return functools.partial(UploadQuotaError, **vars(self)), ()


class DownloadError(PluginError):
    """A download failed: the server refused, stopped sending, or sent something else than announced."""

    code = "download"
    retryable = True


class DownloadRefusedError(DownloadError):
    """A download was not allowed to start or continue, because of its scheme, address, size or hash."""

    code = "download_refused"
    retryable = False


class PackageInstallError(PluginError, RuntimeError):
    """``dynamic_import_pkg`` could not install a package, or installing is disabled."""

    code = "package_install"


class MethodFailedError(PluginError):
    """A plugin method raised; ``error_type`` and ``error_message`` are the plugin's own.

    Callers and failed jobs raise it. A method's worker reports the plugin's own exception to Celery, so
    that Flower shows it with its traceback, and raises this one only if the text had to be changed
    (a secret redacted, a hint added).
    """

    code = "method_failed"

    def __init__(self, error_type: str, error_message: str) -> None:
        self.error_type = error_type
        self.error_message = error_message
        super().__init__(f"{error_type}: {error_message}" if error_message else error_type)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by both arguments; see ``UploadQuotaError.__reduce__``."""
        return MethodFailedError, (self.error_type, self.error_message)


class MethodAbortedError(PluginError):
    """A plugin method ended in a ``BaseException`` (CancelledError, SystemExit, MemoryError, …)."""

    code = "method_aborted"


class CallTimeoutError(PluginError, TimeoutError):
    """A call did not end before its deadline."""

    code = "call_timeout"


class CallCancelledError(PluginError):
    """A call was cancelled before it ended."""

    code = "call_cancelled"


class NotApprovedError(PluginError):
    """A call of a method that requires approval has none, or it was denied or expired; it did not run."""

    code = "not_approved"


class ApprovalDeniedError(NotApprovedError):
    """A person denied the call that a program waited in, or no decision came in time; the program goes on."""

    code = "approval_denied"


class WaitRefusedError(PluginError):
    """A program cannot wait here, so long, or so often; it goes on at once."""

    code = "wait_refused"


class OutcomeUnknownError(PluginError):
    """A worker died during an at-most-once call, or the broker or the database failed around it.

    Its effect may or may not have happened.
    """

    code = "outcome_unknown"


class BrokerError(NekroError):
    """Base of errors about the message broker or the result backend."""

    code = "broker"


class BrokerUnavailableError(BrokerError):
    """The broker or the result backend does not answer within its time limit."""

    code = "broker_unavailable"
    retryable = True


class OverloadedError(BrokerError):
    """A queue, or a caller's list of waiting calls, is full; the call was not sent and did not start."""

    code = "overloaded"
    retryable = True


class MessageRefusedError(BrokerError):
    """A worker refused a message: unsigned, altered, expired, of an unknown version or malformed."""

    code = "message_refused"


class StorageError(NekroError):
    """Base of errors about the database."""

    code = "storage"


class NotFoundError(StorageError, LookupError):
    """A ``get_…`` found no row."""

    code = "not_found"


class ConflictError(StorageError):
    """A row breaks a unique constraint."""

    code = "conflict"


class AlreadyDecidedError(StorageError):
    """A decision on a call's approval came after another one, or after the request had expired."""

    code = "already_decided"


class FencedError(StorageError):
    """A write was refused because the lease of its holder has passed to another holder."""

    code = "fenced"


class DamagedFileError(StorageError):
    """The store lacks the content of a file, or has another one; raised where the file is used."""

    code = "damaged_file"

    def __init__(self, *, name: str, sha256: str, found: str) -> None:
        """
        Args:
            name: the file, or what else the content is of.
            found: what the store has instead.
        """
        self.name = name
        self.sha256 = sha256
        self.found = found
        super().__init__(
            f"the content of {name} (SHA-256 {sha256}) cannot be served: {found}; restore the object from a "
            "backup of the bucket, or write the file again"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the data; see ``UploadQuotaError.__reduce__``."""
        return functools.partial(DamagedFileError, **vars(self)), ()


class FilesQuotaError(StorageError):
    """A change of files would exceed what an area may hold; nothing was changed. Sizes are in bytes."""

    code = "files_quota"

    def __init__(
        self,
        text: str = "",
        *,
        area: str = "",
        wanted_bytes: int = 0,
        limit_bytes: int = 0,
        wanted_names: int = 0,
        limit_names: int = 0,
        setting: str = "",
    ) -> None:
        """
        Args:
            text: of the error of another process, whose data is not known here.
            setting: that limits the bytes.
        """
        self.area = area
        self.wanted_bytes = wanted_bytes
        self.limit_bytes = limit_bytes
        self.wanted_names = wanted_names
        self.limit_names = limit_names
        self.setting = setting
        stated = f" ({setting})" if setting else ""
        super().__init__(
            text
            or f"{area} would hold {wanted_bytes} bytes in {wanted_names} files and directories; it may hold "
            f"{limit_bytes} bytes{stated} and {limit_names} names (0: any number), so nothing was kept; "
            "delete some of them first, or raise the limit"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the data; see ``UploadQuotaError.__reduce__``."""
        return functools.partial(FilesQuotaError, str(self), **vars(self)), ()


class StorageQuotaError(StorageError):
    """A key of the HTTP API would keep more stored than it may; nothing was stored. Sizes are in bytes."""

    code = "storage_quota"

    def __init__(self, *, key_id: str, wanted_bytes: int, used_bytes: int, limit_bytes: int) -> None:
        self.key_id = key_id
        self.wanted_bytes = wanted_bytes
        self.used_bytes = used_bytes
        self.limit_bytes = limit_bytes
        super().__init__(
            f"the key {key_id} keeps {used_bytes} of {limit_bytes} bytes stored, and {wanted_bytes} more do "
            "not fit; delete files that it uploaded, keep messages for a shorter time "
            "(NEKRO_RETENTION__MESSAGES_DAYS), or raise the limit (`nekro keys create "
            "--stored-bytes-limit`, or NEKRO_DATABASE__KEY_BYTES for keys without one)"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the data; see ``UploadQuotaError.__reduce__``."""
        return functools.partial(StorageQuotaError, **vars(self)), ()


class StorageUnavailableError(StorageError):
    """The database does not answer, or its schema is not the one that this version needs."""

    code = "storage_unavailable"
    retryable = True


class SandboxError(NekroError):
    """Base of errors about the sandbox."""

    code = "sandbox"


class SandboxUnavailableError(SandboxError):
    """No driver can isolate code on this machine; the message lists each reason with a suggested fix."""

    code = "sandbox_unavailable"


class SandboxProtocolError(SandboxError):
    """A sandbox sent a frame that is illegal in its state; the run stops with SECURITY."""

    code = "sandbox_protocol"


class LLMError(NekroError):
    """The LLM endpoint failed after all retries, or none is configured.

    ``for_people`` says it in the chat, where model, endpoint and its own words do not belong; None: the
    text of the error is fit for the chat.
    """

    code = "llm"
    retryable = True
    for_people: ClassVar[str | None] = None
    #: Requests that were sent.
    tries: int = 0
    #: Whether an endpoint that was asked says that the prompt is longer than its context.
    is_too_long: bool = False


class BudgetExceededError(LLMError):
    """A budget of the settings, of a key or of a declaration is used up; the model is not asked.

    It is a kind of ``LLMError``, so plugins that do without a model when it fails do so here too. The text
    names the budget, what was used and when it renews, and is fit for people.
    """

    code = "budget_exceeded"
    retryable = False


class ModelGroupError(LLMError):
    """A model group does not exist, or its model does not do what is asked of it."""

    code = "model_group"
    retryable = False
    for_people = "the model that was chosen for this chat is not configured for it"


class LLMAccessError(LLMError):
    """The endpoint refuses the key, or the account has no credit (401, 402, 403, ``insufficient_quota``)."""

    code = "llm_access"
    retryable = False
    for_people = "the model's server does not accept the key or the account of this system"


class LLMBusyError(LLMError):
    """The endpoint limits the rate of requests (429), and went on doing so or asks to wait for too long."""

    code = "llm_busy"
    for_people = "the model's server has too many requests at present; try again later"


class LLMContextError(LLMError):
    """The prompt is longer than the context of the model."""

    code = "llm_context"
    retryable = False
    is_too_long = True
    for_people = "this conversation has become too long for the model"


class LLMFilterError(LLMError):
    """A content filter of the endpoint withheld the answer or refused the prompt."""

    code = "llm_filter"
    retryable = False
    for_people = "the content filter of the model's server withheld the answer"


class LLMNotFoundError(LLMError):
    """The endpoint does not know the address or the model (404)."""

    code = "llm_not_found"
    retryable = False
    for_people = "the model's server does not know the model, or its address is wrong"


class LLMRefusedError(LLMError):
    """The endpoint refuses the request as invalid (another status from 400 to 499)."""

    code = "llm_refused"
    retryable = False
    for_people = "the model's server refused the request"


class LLMTimeoutError(LLMError):
    """The endpoint sent no token, or no complete answer, in time."""

    code = "llm_timeout"
    for_people = "the model did not answer in time"


class LLMUnavailableError(LLMError):
    """The endpoint cannot be reached, cut its answer off, or reports an error of its own (500 and above)."""

    code = "llm_unavailable"
    for_people = "the model's server cannot be reached or fails at present; try again later"


class LLMUnreadableError(LLMError):
    """The endpoint returned an invalid response, such as a web page."""

    code = "llm_unreadable"
    for_people = "the model's server returned an invalid response"


class ServiceError(NekroError):
    """A process did not start, ended early, or conflicts with another one; raised by the CLI."""

    code = "service"


class UsageError(NekroError, ValueError):
    """A command line requests something that cannot be done; raised by the CLI."""

    code = "usage"


class RuntimeNotBoundError(NekroError, RuntimeError):
    """Plugin code used a service before a runtime was bound (``nekro_agent.runtime.bind``)."""

    code = "runtime_not_bound"
