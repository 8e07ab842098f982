"""The vocabulary of the HTTP API: bodies, answers and events.

The gateway, the client and ``--json`` output use these models; the OpenAPI document is generated from
them. Times are aware and in UTC. Bodies refuse unknown fields; answers of newer releases may have more
fields, which a client ignores.

The models of a topic are imported at the first use of one: a command needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from nekro_client.event_types import EventType

if TYPE_CHECKING:
    from nekro_client.models.base import (
        Answer,
        Body,
        ChatKey,
        Page,
        PlainJson,
        Problem,
    )
    from nekro_client.models.calls import (
        Approval,
        Call,
        CallBody,
        Command,
        CommandBody,
        CommandPart,
        CommandResponse,
        CommandResult,
        DecisionBody,
        Level,
        Run,
        RunBody,
        RunEventType,
        TurnError,
    )
    from nekro_client.models.catalogue import (
        CatalogueState,
        ChatPlugin,
        ChatPluginBody,
        ChatPluginState,
        LaneBody,
        LaneState,
        Method,
        Plugin,
        PluginConfig,
        PluginConfigBody,
        PluginState,
        PluginVersion,
    )
    from nekro_client.models.chats import (
        ChatBody,
        ChatSummary,
        GivenTitle,
        Reset,
        StoppedRound,
        Summary,
    )
    from nekro_client.models.costs import (
        BudgetUse,
        Cost,
        CostGroup,
        Costs,
        Series,
        SeriesPoint,
    )
    from nekro_client.models.events import (
        Change,
        ChangeKind,
        Event,
        StreamTicket,
        StreamTicketBody,
    )
    from nekro_client.models.jobs import (
        Job,
        JobAttempt,
        JobLog,
        JobLogEntry,
        SignalBody,
    )
    from nekro_client.models.keys import (
        Act,
        ApiKey,
        ConsoleLogin,
        ConsoleSession,
        CreatedKey,
        KeyBody,
        KeyScope,
    )
    from nekro_client.models.mcp import (
        McpNote,
        McpReply,
        McpReplyBody,
        McpServer,
        McpServerBody,
        McpTool,
        McpTrial,
    )
    from nekro_client.models.messages import (
        FileInfo,
        FilePart,
        ImagePart,
        Message,
        MessageBody,
        MessageSnippet,
        NewFilePart,
        NewImagePart,
        NewPart,
        NewTextPart,
        Part,
        TextPart,
    )
    from nekro_client.models.turns import (
        PostedMessage,
        PromptMessage,
        ReplayedTurn,
        ReplayTurnBody,
        Round,
        RoundAttempt,
        Turn,
        TurnCause,
        TurnState,
        TurnSummary,
        Wait,
    )
    from nekro_client.models.webhooks import (
        AdapterAnswer,
        AdapterRequestBody,
        NewWebhook,
        ReplayBody,
        Replayed,
        Webhook,
        WebhookBody,
        WebhookChange,
        WebhookDelivery,
        WebhookPayload,
    )
    from nekro_client.models.work import (
        Broker,
        DeadLetter,
        Queue,
        Queues,
        RetryBody,
        Timer,
        TimerBody,
        Work,
        Worker,
    )

__all__ = [
    "Act",
    "AdapterAnswer",
    "AdapterRequestBody",
    "Answer",
    "ApiKey",
    "Approval",
    "Body",
    "Broker",
    "BudgetUse",
    "Call",
    "CallBody",
    "CatalogueState",
    "Change",
    "ChangeKind",
    "ChatBody",
    "ChatKey",
    "ChatPlugin",
    "ChatPluginBody",
    "ChatPluginState",
    "ChatSummary",
    "Command",
    "CommandBody",
    "CommandPart",
    "CommandResponse",
    "CommandResult",
    "ConsoleLogin",
    "ConsoleSession",
    "Cost",
    "CostGroup",
    "Costs",
    "CreatedKey",
    "DeadLetter",
    "DecisionBody",
    "Event",
    "EventType",
    "FileInfo",
    "FilePart",
    "GivenTitle",
    "ImagePart",
    "Job",
    "JobAttempt",
    "JobLog",
    "JobLogEntry",
    "KeyBody",
    "KeyScope",
    "LaneBody",
    "LaneState",
    "Level",
    "McpNote",
    "McpReply",
    "McpReplyBody",
    "McpServer",
    "McpServerBody",
    "McpTool",
    "McpTrial",
    "Message",
    "MessageBody",
    "MessageSnippet",
    "Method",
    "NewFilePart",
    "NewImagePart",
    "NewPart",
    "NewTextPart",
    "NewWebhook",
    "Page",
    "Part",
    "PlainJson",
    "Plugin",
    "PluginConfig",
    "PluginConfigBody",
    "PluginState",
    "PluginVersion",
    "PostedMessage",
    "Problem",
    "PromptMessage",
    "Queue",
    "Queues",
    "ReplayBody",
    "ReplayTurnBody",
    "Replayed",
    "ReplayedTurn",
    "Reset",
    "RetryBody",
    "Round",
    "RoundAttempt",
    "Run",
    "RunBody",
    "RunEventType",
    "Series",
    "SeriesPoint",
    "SignalBody",
    "StoppedRound",
    "StreamTicket",
    "StreamTicketBody",
    "Summary",
    "TextPart",
    "Timer",
    "TimerBody",
    "Turn",
    "TurnCause",
    "TurnError",
    "TurnState",
    "TurnSummary",
    "Wait",
    "Webhook",
    "WebhookBody",
    "WebhookChange",
    "WebhookDelivery",
    "WebhookPayload",
    "Work",
    "Worker",
]

#: Names of each module.
_NAMES: Final = {
    "base": (
        "Answer", "Body", "ChatKey", "Page", "PlainJson", "Problem",
    ),
    "calls": (
        "Approval", "Call", "CallBody", "Command", "CommandBody", "CommandPart", "CommandResponse",
        "CommandResult", "DecisionBody", "Level", "Run", "RunBody", "RunEventType", "TurnError",
    ),
    "catalogue": (
        "CatalogueState", "ChatPlugin", "ChatPluginBody", "ChatPluginState", "LaneBody",
        "LaneState", "Method", "Plugin", "PluginConfig", "PluginConfigBody", "PluginState",
        "PluginVersion",
    ),
    "chats": (
        "ChatBody", "ChatSummary", "GivenTitle", "Reset", "StoppedRound", "Summary",
    ),
    "costs": (
        "BudgetUse", "Cost", "CostGroup", "Costs", "Series", "SeriesPoint",
    ),
    "events": (
        "Change", "ChangeKind", "Event", "StreamTicket", "StreamTicketBody",
    ),
    "jobs": (
        "Job", "JobAttempt", "JobLog", "JobLogEntry", "SignalBody",
    ),
    "keys": (
        "Act", "ApiKey", "ConsoleLogin", "ConsoleSession", "CreatedKey", "KeyBody", "KeyScope",
    ),
    "mcp": (
        "McpNote", "McpReply", "McpReplyBody", "McpServer", "McpServerBody", "McpTool", "McpTrial",
    ),
    "messages": (
        "FileInfo", "FilePart", "ImagePart", "Message", "MessageBody", "MessageSnippet",
        "NewFilePart", "NewImagePart", "NewPart", "NewTextPart", "Part", "TextPart",
    ),
    "turns": (
        "PostedMessage", "PromptMessage", "ReplayTurnBody", "ReplayedTurn", "Round", "RoundAttempt",
        "Turn", "TurnCause", "TurnState", "TurnSummary", "Wait",
    ),
    "webhooks": (
        "AdapterAnswer", "AdapterRequestBody", "NewWebhook", "ReplayBody", "Replayed", "Webhook",
        "WebhookBody", "WebhookChange", "WebhookDelivery", "WebhookPayload",
    ),
    "work": (
        "Broker", "DeadLetter", "Queue", "Queues", "RetryBody", "Timer", "TimerBody", "Work", "Worker",
    ),
}  # fmt: skip
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
