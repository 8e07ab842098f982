"""Names of OpenTelemetry's semantic conventions for generative AI.

They are written here because the published package has them in a private module that is about to move to
another package, and takes long to import. A test compares them with that package.

Source: https://github.com/open-telemetry/semantic-conventions-genai (status: development).
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "AGENT_NAME",
    "ARGUMENTS",
    "CHAT",
    "CONVERSATION_ID",
    "EXECUTE_TOOL",
    "FINISH_REASONS",
    "INPUT_MESSAGES",
    "INPUT_TOKENS",
    "INVOKE_AGENT",
    "MAX_TOKENS",
    "NEKRO",
    "OPERATION",
    "OUTPUT_MESSAGES",
    "OUTPUT_TOKENS",
    "PROVIDER",
    "REQUEST_MODEL",
    "RESPONSE_ID",
    "RESPONSE_MODEL",
    "RESULT",
    "STREAM",
    "TEMPERATURE",
    "TIME_TO_FIRST_CHUNK",
    "TOOL_CALL_ID",
    "TOOL_NAME",
    "TOOL_TYPE",
]

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
AGENT_NAME: Final = "gen_ai.agent.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
STREAM: Final = "gen_ai.request.stream"
TEMPERATURE: Final = "gen_ai.request.temperature"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"

# Recorded only if contents are captured.
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
ARGUMENTS: Final = "gen_ai.tool.call.arguments"
RESULT: Final = "gen_ai.tool.call.result"

# Values of OPERATION.
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"
INVOKE_AGENT: Final = "invoke_agent"

#: The agent's name, and the provider of spans that several models may contribute to.
NEKRO: Final = "nekro"
