"""What servers may ask for during a call: a model's answer within a budget, and a person's answer.

A question is a message in the chat. Its answer is a signal to the job that shows the call, so it is a row,
and any process may write it. The key of the signal follows from call and question: if the call runs again
on another worker, which asks the same again, an answer that came meanwhile is for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from loguru import logger

from broker_config.settings import Settings
from nekro.app.jobs import unpack
from nekro.base.tasks import complete
from nekro.extensions.mcp.declarations import Sampling
from nekro.extensions.mcp.questions import (
    Completion,
    Prompt,
    Question,
    QuestionReply,
    answer_key,
    answer_of,
    question_id,
    shown_question,
)
from nekro.plugins.configuration import core_config
from nekro.wire.invocation import new_id
from nekro_agent.durations import FRESH_SECONDS, GRACE_SECONDS, POLL_SECONDS
from nekro_agent.errors import BudgetExceededError, ConflictError, InvalidValueError, LLMError
from nekro_agent.runtime import ModelConfigGroup
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.services.agent.openai import OpenAIResponse, gen_openai_chat_response
from storage.engine import Database
from storage.repositories.job_log import WaitState

__all__ = ["ServerRequests"]


class ServerRequests:
    """Serves what servers ask for, by model groups and messages to chats."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database

    async def complete(self, prompt: Prompt, *, server: str, sampling: Sampling) -> Completion:
        """Ask a language model for the server's plugin, within the budget of the declaration.

        Raises:
            NekroError: the budget is used up, the group of models is unknown, or the model did not answer.
        """
        group = self._group(sampling)
        try:
            answer = await self._asked(prompt, group)
        except BudgetExceededError as exc:
            logger.bind(server=server, error=str(exc)).warning("mcp_budget_exceeded")
            raise
        except LLMError as exc:
            # The server gets no details: they name the endpoint.
            logger.bind(server=server, error=str(exc)).warning("mcp_model_failed")
            raise LLMError("the model did not answer") from None
        logger.bind(server=server, model=answer.use_model, tokens=answer.token_consumption).info(
            "mcp_model_answered"
        )
        return Completion(text=answer.response_content, model=answer.use_model)

    def _group(self, sampling: Sampling) -> ModelConfigGroup:
        try:
            group = core_config(self._settings).get_model_group_info(sampling.group)
        except KeyError as exc:
            raise LLMError(f"its declaration names an unknown group of models: {exc.args[0]}") from None
        if group.MODEL_TYPE != "chat":
            raise LLMError(f"group {sampling.group} has a model for {group.MODEL_TYPE}, not for chats")
        return group

    async def _asked(self, prompt: Prompt, group: ModelConfigGroup) -> OpenAIResponse:
        return await gen_openai_chat_response(
            group.CHAT_MODEL,
            prompt.messages,
            temperature=group.TEMPERATURE if prompt.temperature is None else prompt.temperature,
            top_p=group.TOP_P,
            stop_words=prompt.stop,
            max_tokens=prompt.max_tokens,
            extra_body=group.EXTRA_BODY,
            api_key=group.API_KEY,
            base_url=group.BASE_URL,
            proxy_url=group.CHAT_PROXY or None,
            max_wait_time=self._settings.llm.timeout_seconds,
        )

    async def ask(self, question: Question, ctx: AgentCtx, *, seconds: float) -> QuestionReply:
        """Ask the people of the call's chat; after ``seconds`` without an answer the reply is ``cancel``.

        Raises:
            NekroError: the call belongs to no chat, or the database does not answer.
        """
        if ctx.call_id is None or ctx.from_chat_key is None:
            raise InvalidValueError("this call belongs to no chat, so it cannot ask a question")
        words = [question.server, question.text, question.schema, question.url]
        asked = question_id(ctx.call_id, words)
        give_up_at = time.monotonic() + seconds
        ctx.report_progress(question.percent, f"waits for an answer to question {asked}")
        async with self._waiting(ctx.call_id, answer_key(asked)) as waiter:
            await ctx.send_text(shown_question(question, asked), record=False)
            while time.monotonic() < give_up_at:
                given = await self._taken(ctx.call_id, answer_key(asked), waiter)
                if given is None:
                    await asyncio.sleep(min(FRESH_SECONDS, max(0.0, give_up_at - time.monotonic())))
                    continue
                try:
                    return _reply(question, given)
                except InvalidValueError as exc:
                    await ctx.send_text(f"The answer to question {asked} does not fit: {exc}", record=False)
                    await self._begin(ctx.call_id, answer_key(asked), waiter)
        await ctx.send_text(f"Question {asked} was not answered in time.", record=False)
        return QuestionReply(action="cancel")

    @asynccontextmanager
    async def _waiting(self, call_id: str, key: str) -> AsyncIterator[str]:
        waiter = new_id()
        give_up_at = time.monotonic() + GRACE_SECONDS
        while True:
            try:
                await self._begin(call_id, key, waiter)
                break
            except ConflictError:  # the row of the call's first report is being written
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(POLL_SECONDS)
        try:
            yield waiter
        finally:
            await complete(self._end(call_id, key, waiter))

    async def _begin(self, call_id: str, key: str, waiter: str) -> None:
        async with self._database.autocommit() as transaction:
            await transaction.job_signals.begin(call_id, key=key, waiter=waiter)

    async def _end(self, call_id: str, key: str, waiter: str) -> None:
        async with self._database.autocommit() as transaction:
            await transaction.job_signals.end(call_id, key=key, waiter=waiter)

    async def _taken(self, call_id: str, key: str, waiter: str) -> Any:
        """Remove and return the answer; None if there is none yet."""
        async with self._database.read() as transaction:
            state = await transaction.job_signals.look(call_id, key=key, waiter=waiter)
        if state is not WaitState.READY:
            return None
        async with self._database.begin() as transaction:
            view = await transaction.job_signals.take(call_id, key=key, waiter=waiter)
        return None if view.state is not WaitState.READY else unpack(view.data)[0][0] or {}


def _reply(question: Question, given: Any) -> QuestionReply:
    """Return what the signal of an answer says: ``{"action": …, "content": …}``.

    Raises:
        InvalidValueError: it says something else, or the content does not fit the question.
    """
    if not isinstance(given, dict) or given.get("action") not in ("accept", "decline"):
        raise InvalidValueError('an answer is {"action": "accept" or "decline", "content": {field: value}}')
    if given["action"] == "decline":
        return QuestionReply(action="decline")
    if question.url is not None:
        return QuestionReply(action="accept")
    content = given.get("content") or {}
    if not isinstance(content, dict):
        raise InvalidValueError("`content` must be an object of fields")
    return QuestionReply(action="accept", content=answer_of(question, content))
