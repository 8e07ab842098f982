"""The model of a turn, over HTTP: code with three calls, then words, by what the prompt shows."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from string import Template
from typing import Any, Final
from uuid import uuid4

from benchmarks.tool_use.endpoint import ChatEndpoint, completion

__all__ = ["TurnModel", "answer_to", "new_mark", "question_of"]

_MARK: Final = re.compile(r"turn-[0-9a-f]{12}")
#: Two calls of which one uses what the other returned, and a third that brings a result to the model.
_CODE: Final = Template("""\
I look it up.

```python
first = measure(1, "$mark")
second = measure(first["number"], "$mark")
print(report(second["number"], "$mark"))
```
""")
#: smolagents ends a turn by a call.
_FINAL: Final = Template("""\
I have it.

```python
final_answer("$answer")
```
""")
#: Clients that count tokens need some.
_USAGE: Final = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}


def new_mark() -> str:
    """Return a word that no other turn has."""
    return f"turn-{uuid4().hex[:12]}"


def question_of(mark: str) -> str:
    """Return a person's message."""
    return f"Please look {mark} up and tell me about it."


def answer_to(mark: str) -> str:
    """Return the agent's last words."""
    return f"The answer to {mark} is three."


class TurnModel(ChatEndpoint):
    """Answers the newest mark of a prompt: with code until the prompt has the result of its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    async def answer(self, body: dict[str, Any]) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return code or words; 400 to a prompt without a question."""
        self.requests += 1
        prompt = json.dumps(body["messages"])
        marks = _MARK.findall(prompt)
        if not marks:
            error = {"message": "the prompt has no question", "type": "script", "code": None}
            return HTTPStatus.BAD_REQUEST, {"error": error}
        mark = marks[-1]
        if f"found 3 for {mark}" not in prompt:
            text = _CODE.substitute(mark=mark)
        elif "final_answer" in prompt:
            text = _FINAL.substitute(answer=answer_to(mark))
        else:
            text = answer_to(mark)
        return HTTPStatus.OK, completion({"content": text}, model="bench", usage=_USAGE)
