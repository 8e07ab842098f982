"""One function per request of the API; both clients call them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime

from pydantic import JsonValue

from nekro_client.models import (
    Act,
    ApiKey,
    Approval,
    Call,
    CallBody,
    ChatSummary,
    Command,
    CommandBody,
    CommandResult,
    CostGroup,
    Costs,
    CreatedKey,
    DeadLetter,
    DecisionBody,
    FileInfo,
    Job,
    KeyBody,
    McpServer,
    McpServerBody,
    McpTrial,
    Message,
    MessageBody,
    Method,
    Page,
    Plugin,
    PluginConfig,
    PluginState,
    PostedMessage,
    Queues,
    ReplayedTurn,
    ReplayTurnBody,
    Reset,
    RetryBody,
    Round,
    Run,
    RunBody,
    SignalBody,
    StreamTicket,
    StreamTicketBody,
    Timer,
    TimerBody,
    Turn,
    TurnSummary,
    Worker,
)
from nekro_client.operations import API, Operation, operation, segment
from nekro_client.uploads import Upload


def post_message(
    chat_key: str,
    body: MessageBody,
    *,
    wait_seconds: float,
    idempotency_key: str | None,
) -> Operation[PostedMessage]:
    """``POST /chats/{key}/messages``."""
    return operation(
        "POST",
        f"/chats/{segment(chat_key)}/messages",
        PostedMessage,
        params={"wait": wait_seconds or None},
        body=body,
        idempotency_key=idempotency_key,
        wait_seconds=wait_seconds,
    )


def list_messages(
    chat_key: str, *, cursor: str | None, limit: int | None, with_past: bool
) -> Operation[Page[Message]]:
    """``GET /chats/{key}/messages``."""
    params = {"cursor": cursor, "limit": limit, "with_past": with_past or None}
    return operation("GET", f"/chats/{segment(chat_key)}/messages", Page[Message], params=params)


def list_rounds(chat_key: str, *, cursor: str | None, limit: int | None) -> Operation[Page[Round]]:
    """``GET /chats/{key}/rounds``."""
    params = {"cursor": cursor, "limit": limit}
    return operation("GET", f"/chats/{segment(chat_key)}/rounds", Page[Round], params=params)


def reset_chat(chat_key: str) -> Operation[Reset]:
    """``POST /chats/{key}/reset``."""
    return operation("POST", f"/chats/{segment(chat_key)}/reset", Reset)


def cancel_chat(chat_key: str, *, wait_seconds: float) -> Operation[Reset]:
    """``POST /chats/{key}/cancel``."""
    params = {"wait": wait_seconds or None}
    path = f"/chats/{segment(chat_key)}/cancel"
    return operation("POST", path, Reset, params=params, wait_seconds=wait_seconds)


def stream_ticket(chat_key: str) -> Operation[StreamTicket]:
    """``POST /stream-tickets``."""
    return operation("POST", "/stream-tickets", StreamTicket, body=StreamTicketBody(chat_key=chat_key))


def list_chats(
    *, text: str, failures_since: datetime | None, cursor: str | None, limit: int | None
) -> Operation[Page[ChatSummary]]:
    """``GET /chats``."""
    since = None if failures_since is None else failures_since.isoformat()
    params = {"q": text or None, "failures_since": since, "cursor": cursor, "limit": limit}
    return operation("GET", "/chats", Page[ChatSummary], params=params)


def list_turns(chat_key: str, *, cursor: str | None, limit: int | None) -> Operation[Page[TurnSummary]]:
    """``GET /chats/{key}/turns``."""
    params = {"cursor": cursor, "limit": limit}
    return operation("GET", f"/chats/{segment(chat_key)}/turns", Page[TurnSummary], params=params)


def get_turn(turn_id: str, *, with_values: bool) -> Operation[Turn]:
    """``GET /turns/{id}``."""
    params = {"values": None if with_values else False}
    return operation("GET", f"/turns/{segment(turn_id)}", Turn, params=params)


def get_turn_call(turn_id: str, call_id: str) -> Operation[Call]:
    """``GET /turns/{id}/calls/{call}``."""
    return operation("GET", f"/turns/{segment(turn_id)}/calls/{segment(call_id)}", Call)


def replay_turn(
    turn_id: str, body: ReplayTurnBody, *, idempotency_key: str | None
) -> Operation[ReplayedTurn]:
    """``POST /turns/{id}/replay``."""
    path = f"/turns/{segment(turn_id)}/replay"
    return operation("POST", path, ReplayedTurn, body=body, idempotency_key=idempotency_key)


def list_acts(
    *, action: str | None, subject: str | None, cursor: str | None, limit: int | None
) -> Operation[Page[Act]]:
    """``GET /audit``."""
    params = {"action": action, "subject": subject, "cursor": cursor, "limit": limit}
    return operation("GET", "/audit", Page[Act], params=params)


def cancel_turn(turn_id: str) -> Operation[Turn]:
    """``POST /turns/{id}/cancel``."""
    return operation("POST", f"/turns/{segment(turn_id)}/cancel", Turn)


def run(body: RunBody, *, seconds: float, idempotency_key: str | None) -> Operation[Run]:
    """``POST /runs``."""
    return operation("POST", "/runs", Run, body=body, wait_seconds=seconds, idempotency_key=idempotency_key)


def call(body: CallBody, *, idempotency_key: str | None) -> Operation[Call]:
    """``POST /calls``."""
    # Without a limit of its own, a call has the one of its lane, which the client does not know.
    seconds = 3600.0 if body.timeout_seconds is None else body.timeout_seconds
    return operation("POST", "/calls", Call, body=body, idempotency_key=idempotency_key, wait_seconds=seconds)


def command(body: CommandBody, *, idempotency_key: str | None) -> Operation[CommandResult]:
    """``POST /commands``."""
    seconds = 3600.0 if body.timeout_seconds is None else body.timeout_seconds
    return operation(
        "POST", "/commands", CommandResult, body=body, idempotency_key=idempotency_key, wait_seconds=seconds
    )


def list_commands(*, cursor: str | None = None) -> Operation[Page[Command]]:
    """``GET /commands``."""
    return operation("GET", "/commands", Page[Command], params={"cursor": cursor})


def list_methods(*, cursor: str | None = None) -> Operation[Page[Method]]:
    """``GET /methods``."""
    return operation("GET", "/methods", Page[Method], params={"cursor": cursor})


def list_plugins(*, cursor: str | None = None) -> Operation[Page[Plugin]]:
    """``GET /plugins``."""
    return operation("GET", "/plugins", Page[Plugin], params={"cursor": cursor})


def decide_plugin(key: str, *, is_enabled: bool) -> Operation[PluginState]:
    """``POST /plugins/{key}/enable`` or ``/disable``."""
    action = "enable" if is_enabled else "disable"
    return operation("POST", f"/plugins/{segment(key)}/{action}", PluginState)


def list_mcp_servers(*, cursor: str | None = None) -> Operation[Page[McpServer]]:
    """``GET /mcp/servers``."""
    return operation("GET", "/mcp/servers", Page[McpServer], params={"cursor": cursor})


def put_mcp_server(name: str, body: McpServerBody) -> Operation[McpServer]:
    """``PUT /mcp/servers/{name}``."""
    return operation("PUT", f"/mcp/servers/{segment(name)}", McpServer, body=body)


def remove_mcp_server(name: str) -> Operation[McpServer]:
    """``DELETE /mcp/servers/{name}``."""
    return operation("DELETE", f"/mcp/servers/{segment(name)}", McpServer)


def test_mcp_server(name: str) -> Operation[McpTrial]:
    """``POST /mcp/servers/{name}/test``."""
    return operation("POST", f"/mcp/servers/{segment(name)}/test", McpTrial, wait_seconds=60)


def get_plugin_config(key: str) -> Operation[PluginConfig]:
    """``GET /plugins/{key}/config``."""
    return operation("GET", f"/plugins/{segment(key)}/config", PluginConfig)


def set_plugin_config(key: str, values: Mapping[str, JsonValue]) -> Operation[PluginConfig]:
    """``PATCH /plugins/{key}/config``."""
    return operation("PATCH", f"/plugins/{segment(key)}/config", PluginConfig, body={"values": dict(values)})


def list_jobs(
    *, chat_key: str | None, open_only: bool, cursor: str | None, limit: int | None
) -> Operation[Page[Job]]:
    """``GET /jobs``."""
    params = {"chat_key": chat_key, "open": open_only or None, "cursor": cursor, "limit": limit}
    return operation("GET", "/jobs", Page[Job], params=params)


def get_job(job_id: str) -> Operation[Job]:
    """``GET /jobs/{id}``."""
    return operation("GET", f"/jobs/{segment(job_id)}", Job)


def cancel_job(job_id: str) -> Operation[Job]:
    """``POST /jobs/{id}/cancel``."""
    return operation("POST", f"/jobs/{segment(job_id)}/cancel", Job)


def signal_job(job_id: str, body: SignalBody) -> Operation[Job]:
    """``POST /jobs/{id}/signals``."""
    return operation("POST", f"/jobs/{segment(job_id)}/signals", Job, body=body)


def list_approvals(
    *, chat_key: str | None, state: str | None, cursor: str | None, limit: int | None
) -> Operation[Page[Approval]]:
    """``GET /approvals``."""
    params = {"chat_key": chat_key, "state": state, "cursor": cursor, "limit": limit}
    return operation("GET", "/approvals", Page[Approval], params=params)


def get_approval(approval_id: str) -> Operation[Approval]:
    """``GET /approvals/{id}``."""
    return operation("GET", f"/approvals/{segment(approval_id)}", Approval)


def decide_approval(approval_id: str, body: DecisionBody) -> Operation[Approval]:
    """``POST /approvals/{id}/decision``."""
    return operation("POST", f"/approvals/{segment(approval_id)}/decision", Approval, body=body)


def revoke_approval(approval_id: str) -> Operation[Approval]:
    """``POST /approvals/{id}/revoke``."""
    return operation("POST", f"/approvals/{segment(approval_id)}/revoke", Approval)


def get_costs(
    *, by: CostGroup, since: date | None, until: date | None, cursor: str | None, limit: int | None
) -> Operation[Costs]:
    """``GET /costs``."""
    params = {
        "by": by,
        "since": None if since is None else since.isoformat(),
        "until": None if until is None else until.isoformat(),
        "cursor": cursor,
        "limit": limit,
    }
    return operation("GET", "/costs", Costs, params=params)


def list_timers(*, chat_key: str | None, cursor: str | None, limit: int | None) -> Operation[Page[Timer]]:
    """``GET /timers``."""
    params = {"chat_key": chat_key, "cursor": cursor, "limit": limit}
    return operation("GET", "/timers", Page[Timer], params=params)


def change_timer(timer_id: str, body: TimerBody) -> Operation[Timer]:
    """``PATCH /timers/{id}``."""
    return operation("PATCH", f"/timers/{segment(timer_id)}", Timer, body=body)


def delete_timer(timer_id: str) -> Operation[Timer]:
    """``DELETE /timers/{id}``."""
    return operation("DELETE", f"/timers/{segment(timer_id)}", Timer)


def list_dead_letters(*, cursor: str | None, limit: int | None) -> Operation[Page[DeadLetter]]:
    """``GET /dead-letters``."""
    return operation("GET", "/dead-letters", Page[DeadLetter], params={"cursor": cursor, "limit": limit})


def get_dead_letter(letter_id: str) -> Operation[DeadLetter]:
    """``GET /dead-letters/{id}``."""
    return operation("GET", f"/dead-letters/{segment(letter_id)}", DeadLetter)


def retry_dead_letter(letter_id: str, body: RetryBody) -> Operation[DeadLetter]:
    """``POST /dead-letters/{id}/retry``."""
    return operation("POST", f"/dead-letters/{segment(letter_id)}/retry", DeadLetter, body=body)


def drop_dead_letter(letter_id: str) -> Operation[None]:
    """``DELETE /dead-letters/{id}``."""
    return operation("DELETE", f"/dead-letters/{segment(letter_id)}", None)


def list_workers() -> Operation[Page[Worker]]:
    """``GET /workers``."""
    return operation("GET", "/workers", Page[Worker])


def get_queues() -> Operation[Queues]:
    """``GET /queues``."""
    return operation("GET", "/queues", Queues)


def create_key(body: KeyBody) -> Operation[CreatedKey]:
    """``POST /keys``."""
    return operation("POST", "/keys", CreatedKey, body=body)


def list_keys() -> Operation[Page[ApiKey]]:
    """``GET /keys``."""
    return operation("GET", "/keys", Page[ApiKey])


def revoke_key(key_id: str) -> Operation[ApiKey]:
    """``DELETE /keys/{id}``."""
    return operation("DELETE", f"/keys/{segment(key_id)}", ApiKey)


def readiness() -> Operation[None]:
    """``GET /readyz``."""
    return Operation(method="GET", path="/readyz", parse=lambda response: None)


def list_files(chat_key: str, *, cursor: str | None, limit: int | None) -> Operation[Page[FileInfo]]:
    """``GET /chats/{key}/files``."""
    params = {"cursor": cursor, "limit": limit}
    return operation("GET", f"/chats/{segment(chat_key)}/files", Page[FileInfo], params=params)


def put_file(chat_key: str, upload: Upload) -> Operation[FileInfo]:
    """``PUT /chats/{key}/files/{name}``; its body is the content."""
    path = f"/chats/{segment(chat_key)}/files/{segment(upload.name)}"
    return operation("PUT", path, FileInfo, upload=upload)


def delete_file(chat_key: str, file_id: str) -> Operation[None]:
    """``DELETE /chats/{key}/files/{id}``."""
    return operation("DELETE", f"/chats/{segment(chat_key)}/files/{segment(file_id)}", None)


def file_path(chat_key: str, file_id: str) -> str:
    """Path of a file's content."""
    return f"{API}/chats/{segment(chat_key)}/files/{segment(file_id)}"
