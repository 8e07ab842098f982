"""The scripted model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker_config.settings import LLMSettings
from nekro.agent.llm import LLMRequest
from nekro.agent.llm.clients import create_client
from nekro.agent.llm.scripted_client import ScriptedClient
from nekro.agent.model import ImagePart, PromptMessage, PromptRole, TextPart
from nekro_agent.errors import LLMError

IMAGE = ImagePart(url="data:image/png;base64,AA==")


def request_of(*texts: str, images: int = 0) -> LLMRequest:
    """A prompt of user messages; the last one carries the images."""
    messages = [PromptMessage.of(PromptRole.USER, text) for text in texts[:-1]]
    last = PromptMessage(role=PromptRole.USER, parts=(TextPart(text=texts[-1]), *([IMAGE] * images)))
    return LLMRequest(messages=(PromptMessage.of(PromptRole.SYSTEM, "the policy"), *messages, last))


@pytest.fixture
def write(tmp_path: Path) -> ScriptWriter:
    return ScriptWriter(tmp_path / "script.yaml")


class ScriptWriter:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, text: str) -> ScriptedClient:
        self.path.write_text(text, "utf-8")
        return ScriptedClient(self.path)


async def test_the_first_matching_answer_is_used(write: ScriptWriter) -> None:
    client = write(
        """
        - {when: weather, answer: "one"}
        - {when: "wea.*", answer: "two"}
        - {answer: "else"}
        """
    )
    assert (await client.complete(request_of("the weather?"))).text == "one"
    assert (await client.complete(request_of("we\narrive"))).text == "else"
    assert (await client.complete(request_of("the weather?"))).text == "one"


async def test_only_the_last_user_message_is_searched_by_default(write: ScriptWriter) -> None:
    client = write("[{when: old, answer: a}, {when: policy, anywhere: true, answer: b}]")
    assert (await client.complete(request_of("old", "new"))).text == "b"
    assert (await client.complete(request_of("new", "old"))).text == "a"


async def test_an_answer_may_require_images(write: ScriptWriter) -> None:
    client = write("[{when: look, images: 2, answer: seen}, {answer: blind}]")
    assert (await client.complete(request_of("look", images=1))).text == "blind"
    assert (await client.complete(request_of("look", images=2))).text == "seen"


async def test_groups_of_the_match_are_inserted_into_the_answer(write: ScriptWriter) -> None:
    client = write(
        r"""[{when: 'step (\d+) of (?P<all>\d+)', answer: 'go(${1}, ${all}); f"${x} ${9} {1} \1"'}]"""
    )
    answer = await client.complete(request_of("step 3 of 5"))
    assert answer.text == r'go(3, 5); f"${x} ${9} {1} \1"'


async def test_a_prompt_without_a_matching_answer_is_quoted_in_the_error(write: ScriptWriter) -> None:
    client = write("[{when: x, answer: y}]")
    with pytest.raises(LLMError, match=r"none of its 1 answers fits .* 'hello there'"):
        await client.complete(request_of("hello there"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[{when: '(', answer: x}]", "answer 1: '\\(' is not a regular expression"),
        ("[{wenn: a, answer: x}]", "0.wenn: Extra inputs"),
        ("[{when: a}]", "0.answer: Field required"),
        ("when: a", "has to be a list"),
        ("", "has to be a list"),
        ("[", "is not YAML"),
    ],
)
def test_an_invalid_script_is_refused_with_the_reason(write: ScriptWriter, text: str, fault: str) -> None:
    with pytest.raises(LLMError, match=fault):
        write(text)


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(LLMError, match=r"NEKRO_LLM__SCRIPT: cannot read .*nowhere"):
        create_client(LLMSettings(script=tmp_path / "nowhere.yaml"))


async def test_requests_are_recorded(tmp_path: Path) -> None:
    script = tmp_path / "s.yaml"
    script.write_text("[{answer: x}]")
    client = create_client(LLMSettings(script=script, record=tmp_path / "r.jsonl"))
    answer = await client.complete(request_of("hello", images=1))
    await client.close()
    line = json.loads((tmp_path / "r.jsonl").read_text())
    assert (line["client"], line["messages"][1]["content"][1]["image_url"]["bytes"]) == ("scripted", 1)
    assert (answer.tries, answer.cost, answer.finish_reason) == (1, 0, "stop")
