"""A command that waits for a turn or a job ends with the documented code when it failed, and says why."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from nekro_shell import Shell, open_shell

from nekro.cli.running import ExitCode

PLUGIN = '''
from nekro_agent.api.plugin import AsyncTaskHandle, NekroPlugin, SandboxMethodType, TaskCtl, task
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Probe", module_name="probe", description="For tests.", version="1", author="t", url=""
)


@plugin.mount_async_task("haul")
async def haul(handle: AsyncTaskHandle, ends: str):
    """Wait for a signal, then end."""
    yield TaskCtl.report_progress("under way", 10)
    await handle.wait("go")
    if ends == "raise":
        raise ValueError("the rope broke")
    yield TaskCtl.fail("the cart broke") if ends == "fail" else TaskCtl.success("arrived")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "begin")
async def begin(_ctx: AgentCtx, ends: str) -> None:
    """Start the job."""
    await task.start("haul", ends, _ctx.chat_key, plugin, ends)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "go")
async def go(_ctx: AgentCtx, ends: str) -> None:
    """Let the job continue."""
    task.get_handle("haul", ends).notify("go", None)
'''

#: A message that no rule fits makes the scripted model fail.
SCRIPT = """
- when: 'good day'
  answer: "```python\\nsend_msg_text(_ck, 'Good day to you')\\n```"
- when: 'the plan'
  answer: |
    ```python
    open('/app/shared/plan.txt', 'w').write('x')
    send_msg_file(_ck, '/app/shared/plan.txt')
    ```
"""


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with open_shell({"probe.py": PLUGIN}) as shell:
        script = shell.directory / "script.yaml"
        script.write_text(SCRIPT, "utf-8")
        shell.environment["NEKRO_LLM__SCRIPT"] = str(script)
        yield shell


@pytest.mark.extended
@pytest.mark.usefixtures("up")
def test_send_reports_the_reason_of_a_failed_turn(shell: Shell) -> None:
    done = shell("send", "failing", "what now?", "--wait")
    assert (done.code, done.out) == (ExitCode.LLM, "")
    assert done.err.splitlines()[-1].startswith("error: the turn failed in round 1: ")
    as_json = shell("send", "failing", "what now?", "--wait", "--json")
    assert as_json.code == ExitCode.LLM
    assert sorted(as_json.value) == ["answers", "error", "id"]
    assert as_json.value["error"]["type"] == "LLMError"
    assert "the turn failed" in as_json.value["error"]["message"]


@pytest.mark.extended
@pytest.mark.usefixtures("up")
def test_send_reports_only_the_turn_of_its_own_message(shell: Shell) -> None:
    assert shell("send", "mixed", "what now?", "--wait").code == ExitCode.LLM
    done = shell("send", "mixed", "good day", "--wait")
    assert (done.code, done.out) == (ExitCode.OK, "Good day to you\n")


@pytest.mark.extended
@pytest.mark.usefixtures("up")
def test_send_names_the_files_that_the_agent_sends(shell: Shell) -> None:
    done = shell("send", "files", "the plan", "--wait")
    assert (done.code, done.out) == (ExitCode.OK, "[file /app/uploads/plan.txt]\n")


def begun(shell: Shell, ends: str) -> str:
    """Start a job; returns its id."""
    assert shell.inside("call", "begin", "--args", json.dumps([ends]), "--chat-key", ends).code == 0
    (job,) = shell.inside("jobs", "--open", "--chat-key", ends, "--json").value
    return str(job["id"])


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize(
    ("ends", "reason"), [("raise", "the rope broke"), ("fail", "the cart broke"), ("arrive", "")]
)
def test_watching_a_job_ends_with_its_outcome(shell: Shell, ends: str, reason: str) -> None:
    job = begun(shell, ends)
    assert shell.inside("call", "go", "--args", json.dumps([ends]), "--chat-key", ends).code == 0
    done = shell("jobs", "watch", job, "--json")
    if not reason:
        assert (done.code, [entry["state"] for entry in done.value]) == (ExitCode.OK, ["succeeded"])
        return
    assert done.code == ExitCode.METHOD
    assert [entry["state"] for entry in done.value["jobs"]] == ["failed"]
    assert reason in done.value["error"]["message"]
    plain = shell.inside("jobs", "watch", job)
    assert plain.code == ExitCode.METHOD
    assert reason in plain.err.splitlines()[-1]
