"""A client that replays a file instead of a model: for demos, tests and trials of plugins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from broker_config.model_groups import DEFAULT_GROUP
from nekro.agent.llm.port import LLMAnswer, LLMRequest, ModelSpent, cost_of
from nekro.agent.llm.telemetry import Endpoint, RequestRecord, inference
from nekro.agent.model import PromptMessage, PromptRole
from nekro.agent.text import cut_middle
from nekro_agent.errors import LLMError

__all__ = ["ScriptedAnswer", "ScriptedClient"]

_MODEL: Final = "scripted"
_ENDPOINT: Final = Endpoint(provider="nekro.scripted")
_CHARS_PER_TOKEN: Final = 4
_PLACEHOLDER: Final = re.compile(r"\$\{(\w+)\}")


class ScriptedAnswer(BaseModel):
    """One entry of a script: an answer and its condition."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    when: str = Field("", description="Regular expression, searched in the text of the last user message.")
    anywhere: bool = Field(False, description="Search `when` in the text of every message instead.")
    images: int = Field(0, ge=0, description="Image parts that the messages searched must carry at least.")
    answer: str = Field(description="The answer; `${1}` and `${name}` are groups of `when`.")


_SCRIPT: Final = TypeAdapter(list[ScriptedAnswer])


class ScriptedClient:
    """Returns the first answer of a script whose condition matches the prompt; stateless.

    The script is a YAML list of ``ScriptedAnswer``. Because only the prompt decides, any number
    of worker processes may replay the same script, and a repeated round gets the same answer
    again.
    """

    def __init__(
        self, script: Path, *, record: Path | None = None, input_price: float = 0, output_price: float = 0
    ) -> None:
        """Read the script; the prices are per million tokens, so that budgets can be tried."""
        self._prices = input_price, output_price
        self._path = script
        self._answers = _load(script)
        self._patterns = [_compile(script, number, entry) for number, entry in enumerate(self._answers, 1)]
        self._record = RequestRecord(record, client=_MODEL)

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Return the scripted answer.

        Raises:
            LLMError: no entry matches; the message quotes the prompt's last user message.
        """
        await self._record.add(request, model=_MODEL, number=1)
        with inference(request, _ENDPOINT, model=_MODEL, group=DEFAULT_GROUP, number=1) as running:
            text = self._answer(request)
            if request.on_delta is not None:
                request.on_delta(1, text)
            spent = self._spent(request, text)
            if request.on_spent is not None:
                request.on_spent(spent)
            running.finish_reason, running.text, running.cost = "stop", lambda: text, spent.cost
            running.prompt_tokens, running.answer_tokens = spent.prompt_tokens, spent.answer_tokens
        return LLMAnswer(
            text=text,
            model=_MODEL,
            prompt_tokens=spent.prompt_tokens,
            answer_tokens=spent.answer_tokens,
            finish_reason="stop",
            tries=1,
            cost=spent.cost,
        )

    def _spent(self, request: LLMRequest, text: str) -> ModelSpent:
        prompt, answer = request.chars // _CHARS_PER_TOKEN, len(text) // _CHARS_PER_TOKEN
        cost = cost_of(prompt, answer, input_price=self._prices[0], output_price=self._prices[1])
        return ModelSpent(
            group=DEFAULT_GROUP, model=_MODEL, prompt_tokens=prompt, answer_tokens=answer, cost=cost
        )

    async def close(self) -> None:
        """Do nothing; there is nothing to release."""

    def _answer(self, request: LLMRequest) -> str:
        last_user = [message for message in request.messages if message.role is PromptRole.USER][-1:]
        for entry, pattern in zip(self._answers, self._patterns, strict=True):
            searched = list(request.messages) if entry.anywhere else last_user
            match = _find(pattern, searched)
            images = sum(len(message.images) for message in searched)
            if match is not None and images >= entry.images:
                return _fill(entry.answer, match)
        quoted = cut_middle(last_user[0].text if last_user else "", 400)
        raise LLMError(
            f"script {self._path}: none of its {len(self._answers)} answers fits a prompt whose last user "
            f"message has {len(last_user[0].images) if last_user else 0} images and reads: {quoted!r}"
        )


def _find(pattern: re.Pattern[str], messages: list[PromptMessage]) -> re.Match[str] | None:
    for message in reversed(messages):
        match = pattern.search(message.text)
        if match is not None:
            return match
    return None


def _fill(answer: str, match: re.Match[str]) -> str:
    """Replace ``${1}`` and ``${name}`` with groups of the match; leave other placeholders unchanged."""

    def group(placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        key: int | str = int(name) if name.isdecimal() else name
        known = match.re.groups >= key if isinstance(key, int) else key in match.re.groupindex
        return (match[key] or "") if known else placeholder[0]

    return _PLACEHOLDER.sub(group, answer)


def _load(script: Path) -> list[ScriptedAnswer]:
    try:
        return _SCRIPT.validate_python(yaml.safe_load(script.read_text("utf-8")))
    except OSError as exc:
        raise LLMError(f"NEKRO_LLM__SCRIPT: cannot read {script}: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise LLMError(f"NEKRO_LLM__SCRIPT: {script} is not YAML: {exc}") from exc
    except ValidationError as exc:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}"
            for fault in exc.errors(include_url=False, include_input=False)
        )
        raise LLMError(
            f"NEKRO_LLM__SCRIPT: {script} has to be a list of answers with `when` and `answer`: {faults}"
        ) from exc


def _compile(script: Path, number: int, entry: ScriptedAnswer) -> re.Pattern[str]:
    try:
        return re.compile(entry.when, re.DOTALL | re.MULTILINE)
    except re.error as exc:
        raise LLMError(
            f"NEKRO_LLM__SCRIPT: {script}, answer {number}: {entry.when!r} is not a regular expression: {exc}"
        ) from exc
