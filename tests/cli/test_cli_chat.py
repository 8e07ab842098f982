"""`nekro chat` at a real terminal: editing, history, Ctrl-C, files; and from a pipe."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from chat_server import Behaviour, SceneServer, SeenRequest, send_chunk, send_event, start_stream
from nekro_shell import Shell, open_shell
from terminal import Terminal

from nekro.cli.running import ExitCode

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("up")]

PLUGIN = '''
import asyncio

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Probe", module_name="probe", description="For tests.", version="1", author="t", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "hold")
async def hold(_ctx: AgentCtx) -> None:
    """Last until somebody stops it."""
    from nekro_agent.api import message
    await message.send_text(_ctx.chat_key, "holding", _ctx)
    await asyncio.Event().wait()
'''

#: The last line of the chat decides.
SCRIPT = r"""
- when: 'echo (?P<word>\w+)(?!.*(hold on|draw|look))'
  answer: "```python\nsend_msg_text(_ck, 'echo heard')\n```"
- when: 'hold on(?!.*(echo|draw|look))'
  answer: "```python\nhold()\n```"
- when: 'draw(?!.*(echo|hold on|look))'
  answer: |
    ```python
    open('/app/shared/chart.txt', 'w').write('a chart')
    send_msg_file(_ck, '/app/shared/chart.txt')
    ```
- when: 'look(?!.*(echo|hold on|draw))'
  answer: "```python\nsend_msg_text(_ck, 'it says ' + open('/app/uploads/my notes.txt').read())\n```"
"""


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with open_shell({"probe.py": PLUGIN}) as shell:
        script = shell.directory / "script.yaml"
        script.write_text(SCRIPT, "utf-8")
        shell.environment.update({"NEKRO_LLM__SCRIPT": str(script), "TERM": "xterm"})
        yield shell


class Chat(Terminal):
    """A chat at a terminal, ready for its first line."""

    def __init__(self, shell: Shell, *arguments: str) -> None:
        super().__init__(["chat", *arguments], directory=shell.directory, environment=shell.environment)
        self.until("/help lists commands")
        self.until("> ")


@pytest.fixture
def chats(shell: Shell) -> Iterator[list[Chat]]:
    """Chats that are closed at the end of the test."""
    opened: list[Chat] = []
    yield opened
    for chat in opened:
        chat.close()


def test_a_line_is_edited_and_recalled_also_by_the_next_run(shell: Shell, chats: list[Chat]) -> None:
    chats.append(chat := Chat(shell, "--chat-key", "edited"))
    chat.type("echx\x7fo twice\r")
    chat.until("echo heard")
    chat.until("> ")
    chat.type("\x1b[A\r")  # the line before
    assert "echo twice" in chat.until("echo heard")
    chat.until("> ")
    chat.type("\x04")
    assert chat.ended() == 0
    listed = shell.inside("history", "edited", "--json").value
    assert [m["text"] for m in listed if m["kind"] == "user"] == ["echo twice", "echo twice"]
    assert (shell.data_dir / "chat_history").stat().st_mode & 0o077 == 0
    chats.append(chat := Chat(shell, "--chat-key", "recalled"))
    chat.type("\x1b[A")
    chat.until("echo twice")
    chat.type("\x15/quit\r")
    assert chat.ended() == 0


def test_ctrl_c_stops_the_turn_and_leaves_the_chat_open(shell: Shell, chats: list[Chat]) -> None:
    chats.append(chat := Chat(shell, "--chat-key", "stopped"))
    chat.type("hold on\r")
    chat.until("holding")
    chat.type("\x03")
    chat.until("stopping the turn")
    chat.until("> ")
    (entry,) = shell.inside("history", "stopped", "--trace", "--json").value["rounds"]
    assert entry["state"] == "cancelled"
    chat.type("echo again\r")
    chat.until("echo heard")
    chat.until("> ")
    chat.type("\x03")
    chat.until("Ctrl-C again ends")
    chat.type("\x03")
    assert chat.ended() == ExitCode.INTERRUPTED


def test_files_are_sent_saved_and_copied(shell: Shell, chats: list[Chat]) -> None:
    (shell.directory / "my notes.txt").write_text("buy milk", "utf-8")
    (shell.directory / "downloads").mkdir()
    chats.append(chat := Chat(shell, "--chat-key", "files", "--save", "downloads"))
    chat.type("/file 'my notes.txt' look at this\r")
    chat.until("sends /app/uploads/my notes.txt")
    chat.until("it says buy milk")
    chat.until("> ")
    chat.type("draw\r")
    chat.until("wrote 7 bytes to downloads/chart.txt")
    chat.until("> ")
    chat.type("/save /app/uploads/chart.txt mine.txt\r")
    chat.until("wrote 7 bytes to mine.txt")
    chat.until("> ")
    chat.type("/file missing.txt\r")
    chat.until("error: missing.txt does not exist")
    chat.until("> ")
    chat.type("\x04")
    assert chat.ended() == 0
    assert (shell.directory / "downloads" / "chart.txt").read_text() == "a chart"
    assert (shell.directory / "mine.txt").read_text() == "a chart"
    listed = shell.inside("history", "files", "--json").value
    sent = next(m for m in listed if m["kind"] == "user")
    text, file = sent["data"]["content_data"]
    assert (sent["text"], text["text"]) == ("look at this", "look at this")
    assert (file["type"], file["file_name"], file["size_bytes"]) == ("file", "my notes.txt", 8)


def test_a_failed_turn_is_explained_and_is_the_exit_code_if_it_was_the_last(shell: Shell) -> None:
    done = shell("chat", "--chat-key", "failing", given="what now?\n")
    assert (done.code, done.out) == (ExitCode.LLM, "")
    assert "error: the turn failed in round 1" in done.err
    done = shell("chat", "--chat-key", "failing", given="what now?\necho once\n")
    assert (done.code, done.out) == (ExitCode.OK, "echo heard\n")


def test_a_line_with_two_slashes_is_sent_with_one(shell: Shell) -> None:
    assert shell("chat", "--chat-key", "slashes", given="//file echo this\n").out == "echo heard\n"
    listed = shell.inside("history", "slashes", "--json").value
    assert listed[0]["text"] == "/file echo this"


@pytest.mark.parametrize("word", ["exit", "Quit", "/quit"])
def test_a_word_ends_the_chat_and_is_not_sent(shell: Shell, word: str) -> None:
    done = shell("chat", "--chat-key", f"ends-{word.strip('/')}", given=f"{word}\necho once\n")
    assert (done.code, done.out) == (ExitCode.OK, "")


def write_slowly(released: threading.Event) -> Behaviour:
    async def behave(writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        await start_stream(writer)
        await send_chunk(writer, request, {"content": "Once upon a time there was a cook"})
        while not released.is_set():
            await send_chunk(writer, request, {"content": " and a cook"})
            await asyncio.sleep(0.05)
        await send_chunk(writer, request, {"content": ". The end."}, "stop")
        await send_event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return behave


def test_words_are_shown_once_while_the_model_writes_them() -> None:
    released = threading.Event()
    model = SceneServer({"story": [write_slowly(released)]})
    llm = {"NEKRO_LLM__BASE_URL": model.start(), "NEKRO_LLM__MODEL": "m", "TERM": "xterm"}
    with open_shell({}, **llm) as shell:
        chat = Chat(shell, "--chat-key", "story")
        try:
            chat.type("scene:story\r")
            chat.until("Once upon a time there was a cook and")
            released.set()
            rest = chat.until("The end.")
            assert "Once upon" not in rest
            chat.type("quit\r")
            assert chat.ended() == ExitCode.OK
            assert "Once upon" not in chat.shown
        finally:
            released.set()
            chat.close()
            model.stop()
