"""The system under evaluation: `nekro up` with its gateway, on a data directory of its own."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness.processes import Child, free_port
from nekro_agent.durations import POLL_SECONDS

if TYPE_CHECKING:
    from broker_config.settings import LLMSettings, Settings

__all__ = ["Endpoint", "is_real_model", "running_system", "settings_for"]

_PLUGINS: Final = Path(__file__).parent / "plugins"
_START_SECONDS: Final = 120.0
_READY: Final = re.compile(r"ready: .*HTTP API on (http://\S+?);")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The model's endpoint, for requests of the evaluation's own; prices are per million tokens."""

    base_url: str
    api_key: str
    model: str
    input_price: float = 0.0
    output_price: float = 0.0

    @classmethod
    def of(cls, llm: LLMSettings) -> Endpoint:
        """Return that of the settings, which have a base URL and a model."""
        return cls(
            base_url=(llm.base_url or "").rstrip("/"),
            api_key=llm.api_key.get_secret_value() if llm.api_key else "none",
            model=llm.model or "",
            input_price=llm.input_price_per_million,
            output_price=llm.output_price_per_million,
        )


def is_real_model(settings: Settings) -> bool:
    """Whether the settings name a model, and no script in its place."""
    return bool(settings.llm.script is None and settings.llm.base_url and settings.llm.model)


def settings_for(base: Settings, data_dir: Path, *, scripted_url: str | None) -> Settings:
    """Return the user's settings with services, plugins and data of the evaluation's own.

    Args:
        scripted_url: base URL of the scripted model; None keeps the model of the settings.
    """
    llm = base.llm.model_copy(update={"record": data_dir / "requests.jsonl"})
    if scripted_url is not None:
        from benchmarks.evaluation.script import MODEL

        llm = type(base.llm)(
            base_url=scripted_url, model=MODEL, stream=False, tries=1, vision=True, record=llm.record
        )
    update = {
        "data_dir": data_dir,
        "broker": base.broker.model_copy(update={"url": None}),
        "results": base.results.model_copy(update={"url": None}),
        "database": base.database.model_copy(update={"url": None}),
        "gateway": base.gateway.model_copy(update={"host": "127.0.0.1", "port": free_port(), "socket": None}),
        "plugins": base.plugins.model_copy(
            update={"dirs": (_PLUGINS,), "disabled": (), "load_shipped": True}
        ),
        "agent": type(base.agent)(),
        "approval": type(base.approval)(),
        "llm": llm,
    }
    if scripted_url is not None:
        update["models"] = {}
    return base.model_copy(update=update)


@asynccontextmanager
async def running_system(settings: Settings) -> AsyncIterator[str]:
    """Run `nekro up`; yields the URL of its gateway when all workers are ready.

    Raises:
        RuntimeError: it did not start; the message has the end of its log.
    """
    from nekro.cli.environment import environment_of

    settings.data_dir.mkdir(parents=True, exist_ok=True)
    # In the data directory, so that no `.env` of the user's working directory is read.
    command = [str(Path(sys.executable).with_name("nekro")), "up"]
    log = settings.data_dir / "up.log"
    with Child(command, log=log, environment=environment_of(settings), directory=settings.data_dir) as child:
        try:
            async with asyncio.timeout(_START_SECONDS):
                while (ready := _READY.search(log.read_text("utf-8", "replace"))) is None:
                    if child.ended() is not None:
                        raise RuntimeError(f"`nekro up` ended:\n{child.last_words()}")
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"`nekro up` did not start:\n{child.last_words()}") from None
        yield ready[1]
