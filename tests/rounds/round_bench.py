"""Rounds in the test's own process: real database, sandbox and claims; the model is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from waiting import WAIT_SECONDS, eventually

from broker_config.embedded import resolve_signing_key
from broker_config.settings import ApprovalResume, Settings
from nekro.agent.llm import LLMAnswer, LLMRequest
from nekro.agent.rounds import RoundRunner
from nekro.app import use_cases
from nekro.app.catalogue import BUILT_IN_TASKS
from nekro.app.model_meters import RoundBudgets
from nekro.broker.program_calls import Marked, ProgramCall
from nekro.sandbox.manager import SandboxManager
from nekro.wire.invocation import Envelope, Invocation, Signer
from nekro.wire.values import encode_arguments
from nekro_agent.errors import CallTimeoutError, MethodFailedError, NekroError
from storage.repositories.messages import Message
from storage.repositories.rounds import Round
from storage.states import FINAL_ROUND_STATES
from workers.rounds.drain import RoundDrain
from workers.rounds.input import PictureLoader, RoundInputs
from workers.services import WorkerServices

Answer = str | Callable[[LLMRequest], Awaitable[str]]


class Model:
    """Returns the given answers in turn, then repeats the last one; records its requests."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Answer."""
        self.prompts.append("\n".join(message.text for message in request.messages))
        answer = self.answers[min(len(self.prompts), len(self.answers)) - 1]
        text = answer if isinstance(answer, str) else await answer(request)
        return LLMAnswer(
            text=f"```python\n{text}\n```", model="tests-1", prompt_tokens=100, answer_tokens=7,
            finish_reason="stop", tries=1, cost=0.25,
        )  # fmt: skip

    async def close(self) -> None:
        """Nothing to release."""


class DirectCaller:
    """``MethodCaller`` without a broker: calls go directly to a worker's handler."""

    def __init__(self, services: WorkerServices) -> None:
        self._services = services
        self._signer = Signer.from_text(resolve_signing_key(services.settings).get_secret_value())
        self._running: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._marks: dict[str, dict[str, Marked]] = {}
        self._left_chats: set[str] = set()
        self.revoked: list[str] = []

    async def call(self, invocation: Invocation, *, lane: str) -> Envelope:
        """Run the method as a task of its own, as a worker would."""
        task = self._running.get(invocation.call_id)
        if task is None:
            services = self._services
            targets = services.built_in_methods if invocation.method in BUILT_IN_TASKS else services.methods
            work = services.call_handler.handle(
                self._signer.sign(invocation), task_name=invocation.method, find=targets.find
            )
            self._running[invocation.call_id] = task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait([task], timeout=invocation.remaining_seconds())
        except asyncio.CancelledError:
            if invocation.chat_key not in self._left_chats:
                await self.revoke(invocation.call_id)
            raise
        if not done:
            raise CallTimeoutError(f"{invocation.method}: no answer")
        try:
            return Envelope.model_validate(task.result())
        except NekroError:
            raise
        except Exception as exc:
            raise MethodFailedError(type(exc).__name__, str(exc)) from exc

    async def call_or_detach(
        self,
        invocation: Invocation,
        *,
        lane: str,
        seconds: float,
        leave: Callable[[], Awaitable[bool]],
        program: ProgramCall | None = None,
    ) -> Envelope | None:
        """Run it as ``call`` does, and detach it when its caller has waited long enough."""
        if program is not None:
            marks = self._marks.setdefault(program.program_id, {})
            marks.setdefault(program.call_id, Marked(program.note))
        call = asyncio.create_task(self.call(invocation, lane=lane))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            done, _ = await asyncio.wait([call], timeout=seconds)
            return None if not done and await leave() else await call
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            raise

    async def marks(self, chat_key: str, program_id: str) -> dict[str, Marked]:
        """The calls that a program has made."""
        return self._marks.get(program_id, {})

    async def results(self, chat_key: str, call_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What those of the calls have returned that succeeded."""
        ended = {one: self._running[one] for one in call_ids if one in self._running}
        return {
            one: {"status": "SUCCESS", "task_id": one, "result": task.result()}
            for one, task in ended.items()
            if task.done() and not task.exception()
        }

    def lose_everything(self) -> None:
        """As if the broker and Redis were emptied."""
        self._marks.clear()
        self._running.clear()

    def forget(self, chat_key: str, program_id: str) -> None:
        """Forget them."""
        self._marks.pop(program_id, None)

    @contextmanager
    def leaving(self, chat_key: str) -> Iterator[None]:
        """Let calls run on that are cancelled in the block."""
        self._left_chats.add(chat_key)
        yield
        self._left_chats.discard(chat_key)

    async def revoke(self, call_id: str) -> None:
        """Cancel it."""
        self.revoked.append(call_id)
        task = self._running[call_id]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Bench:
    """One chat system: services of this process, with a drain per simulated worker."""

    def __init__(self, services: WorkerServices, sandboxes: SandboxManager) -> None:
        self.services = services
        self.settings: Settings = services.settings
        self.database = services.database
        self.caller = DirectCaller(services)
        services.dispatcher._caller = self.caller  # type: ignore[assignment]
        self._sandboxes = sandboxes

    def drain(
        self,
        model: Model,
        *,
        owner: str = "w1",
        settings: Settings | None = None,
        slots: int = 1,
        is_stopping: Callable[[], bool] = lambda: False,
        on_rest: Callable[[str], object] = lambda chat_key: None,
        redact: Callable[[str], str] = str,
    ) -> RoundDrain:
        """Build what a rounds worker drains with; with one slot it releases its chat after each round."""
        settings = settings or self.settings
        services = self.services
        return RoundDrain(
            database=self.database,
            leases=services.leases,
            publisher=services.publisher,
            ledger=services.ledger,
            runner=RoundRunner(
                llm=model,
                sandbox=self._sandboxes,
                agent_settings=settings.agent,
                sandbox_settings=settings.sandbox,
            ),
            inputs=RoundInputs(
                self.database,
                services.registry,
                services.dispatcher,
                services.host,
                PictureLoader(services.settings, services.files_of),
                keep_awake=settings.plugins.keep_awake,
                keeps_variables=settings.sandbox.keep_variables,
                journal_bytes=settings.agent.journal_bytes,
                parks=settings.approval.resume is ApprovalResume.PROGRAM,
            ),
            budgets=RoundBudgets(services.spending, settings),
            settings=settings.agent,
            owner=owner,
            slots=slots,
            is_stopping=is_stopping,
            on_rest=on_rest,
            redact=redact,
            leaving=services.dispatcher.leaving,
            program_ended=services.dispatcher.program_ended,
        )

    async def say(self, chat_key: str, text: str, *, user_id: str = "u1") -> str | None:
        """Add a user's message."""
        return await use_cases.receive_message(
            self.services, chat_key, text, user_id=user_id, user_name=user_id
        )

    async def play(self, chat_key: str, drain: RoundDrain, *, seconds: float = WAIT_SECONDS) -> list[Round]:
        """Drain until nothing waits or runs; returns the chat's rounds."""
        async with asyncio.timeout(seconds):
            while True:
                await drain.drain(chat_key)
                rounds = await self.rounds(chat_key)
                if all(item.state in FINAL_ROUND_STATES for item in rounds):
                    return rounds
                await asyncio.sleep(0.01)

    async def rounds(self, chat_key: str) -> list[Round]:
        """The chat's rounds, in order."""
        async with self.database.read() as tx:
            return await tx.rounds.newest(chat_key, limit=100)

    async def messages(self, chat_key: str, *, with_past: bool = False) -> list[Message]:
        """The chat's messages, in order."""
        async with self.database.read() as tx:
            return await tx.messages.newest(chat_key, limit=100, with_past=with_past)

    async def let_leases_run_out(self) -> None:
        """Expire every lease, as if its holder had stopped renewing it."""
        async with self.database.begin() as tx:
            for table in ("chats", "calls"):
                await tx.connection.exec_driver_sql(
                    f"UPDATE {table} SET lease_until = '2000-01-01 00:00:00.000000'"
                    " WHERE lease_until IS NOT NULL"
                )

    def journal(self) -> list[str]:
        """The plugin's journal."""
        path = self.settings.data_dir / "plugins" / "tests.scene" / "journal.txt"
        return path.read_text().splitlines() if path.exists() else []

    async def noted(self, line: str, *, seconds: float = WAIT_SECONDS) -> None:
        """Wait for a line of the journal."""
        await eventually(lambda: line in self.journal(), what=f"{line!r} in the journal", seconds=seconds)


def invocation(method: str, args: tuple[object, ...], *, call_id: str, round_: Round) -> Invocation:
    """An invocation as the code of a round would make it."""
    now = datetime.now(UTC)
    return Invocation(
        call_id=call_id, method=method, chat_key=round_.chat_key, container_key="c", round_id=round_.id,
        turn_id=round_.turn_id, round_number=round_.number, issued_at=now,
        deadline=now + timedelta(seconds=WAIT_SECONDS), args=encode_arguments(args, {}),
    )  # fmt: skip


def states(rounds: Sequence[Round]) -> list[str]:
    """The rounds' states as text."""
    return [item.state.value for item in rounds]
