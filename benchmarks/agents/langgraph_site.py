"""The peer LangGraph: ``python -m benchmarks.agents.langgraph_site PORT MODEL_URL DATABASE_URL``.

A graph of two nodes, the model and a subprocess for its code, with the checkpointer on PostgreSQL; a chat is
a thread.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypedDict

from benchmarks.agents.code_process import block_of, run_code
from benchmarks.agents.methods import SYSTEM, TOOLS
from benchmarks.agents.site import Agent, serve

__all__ = ["State", "main"]


class State(TypedDict):
    """What a checkpoint keeps: the messages of a chat."""

    messages: Annotated[list[dict[str, Any]], operator.add]


@asynccontextmanager
async def _opened(model_url: str, database_url: str) -> AsyncIterator[Agent]:
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
    from langgraph.graph import END, START, StateGraph
    from openai import AsyncOpenAI
    from psycopg.rows import dict_row
    from psycopg_pool import AsyncConnectionPool

    client = AsyncOpenAI(base_url=model_url, api_key="none")
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}

    async def ask_model(state: State) -> dict[str, Any]:
        messages: Any = [{"role": "system", "content": SYSTEM}, *state["messages"]]
        answer = await client.chat.completions.create(model="bench", messages=messages)
        return {"messages": [{"role": "assistant", "content": answer.choices[0].message.content}]}

    async def run(state: State) -> dict[str, Any]:
        code = block_of(state["messages"][-1]["content"]) or ""
        return {"messages": [{"role": "user", "content": await run_code(code, TOOLS)}]}

    def after_model(state: State) -> str:
        return END if block_of(state["messages"][-1]["content"]) is None else "run"

    async with AsyncConnectionPool(database_url, max_size=20, kwargs=options, open=False) as pool:
        saver = AsyncPostgresSaver(pool)  # type: ignore[arg-type, unused-ignore]
        await saver.setup()
        graph = StateGraph(State)
        graph.add_node("model", ask_model)
        graph.add_node("run", run)
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", after_model)
        graph.add_edge("run", "model")
        compiled = graph.compile(checkpointer=saver)

        async def turn(chat: str, text: str) -> str:
            config: Any = {"configurable": {"thread_id": chat}}
            first: Any = {"messages": [{"role": "user", "content": text}]}
            state = await compiled.ainvoke(first, config)
            return str(state["messages"][-1]["content"])

        yield turn


def main(port: str, model_url: str, database_url: str) -> None:
    """Serve until a signal ends the process."""
    serve(_opened(model_url, database_url), port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
