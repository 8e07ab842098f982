"""Code and methods of real workers on two hosts that share no disk."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from s3_process import BUCKET, KEY, SECRET, S3Server
from two_hosts import TwoHosts, run, two_hosts
from waiting import eventually

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.sandbox.models import StopType

SCRIPT = """
- when: 'not kept in /app/shared'
  answer: |
    ```python
    open("/app/shared/told.txt", "w").write("the model was told")
    ```
- when: 'leave a link'
  answer: |
    ```python
    import os
    os.symlink("/etc", "/app/shared/link")
    raise ValueError("so that there is another round")
    ```
- when: 'half of it'
  answer: |
    ```python
    open("/app/shared/note.txt", "w").write("half")
    import time
    time.sleep(60)
    ```
- when: 'write it'
  answer: |
    ```python
    open("/app/shared/note.txt", "w").write("of a round")
    send_msg_text(_ck, "written")
    ```
- when: ''
  answer: |
    ```python
    # noted
    ```
"""


@pytest.fixture(scope="module")
def hosts(
    tmp_path_factory: pytest.TempPathFactory,
    own_redis_url: str,
    s3_server: Callable[[str], S3Server],
) -> Iterator[TwoHosts]:
    directory = tmp_path_factory.mktemp("hosts")
    script = directory / "script.yaml"
    script.write_text(SCRIPT)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    variables = s3_server("moto").variables
    overrides = {
        "llm": {"script": script},
        "agent": {"lease_seconds": 3},
        "sandbox": {"shared_files": 20},
    }
    with two_hosts(directory, own_redis_url, url, variables, **overrides) as hosts:
        hosts.start("a", "rounds")
        hosts.start("b", "methods")
        yield hosts


@pytest.fixture(scope="module")
def own_redis_url(redis_server: object) -> str:
    return str(redis_server.url)  # type: ignore[attr-defined]


@pytest.fixture
async def services(hosts: TwoHosts) -> AsyncIterator[Services]:
    services = hosts.services()
    await services.start()
    yield services
    await services.close()


@pytest.fixture
def chat_key() -> str:
    return f"test-{uuid.uuid4().hex}"


async def test_a_method_on_another_host_reads_and_writes_files_of_the_program(
    hosts: TwoHosts, services: Services, chat_key: str
) -> None:
    code = """
open("/app/shared/data.csv", "w").write("1,2")
path = paint("/app/shared/data.csv")
print(open("/app/shared/data.csv").read(), open("/app/shared/picture.png").read(), open(path).read())
paint_in_thread("/app/shared/data.csv")
print(open("/app/shared/data.csv").read())
"""
    report = await run(services, code, chat_key)
    assert report.error is None, (report.output, hosts.logs())
    assert report.output == "1,2,changed picture of 1,2 upload of 1,2\n1,2,CHANGED\n"


async def test_programs_on_both_hosts_follow_each_other(
    hosts: TwoHosts, services: Services, chat_key: str
) -> None:
    for host, other in ("a", "b"), ("b", "a"):
        code = f"f = open('/app/shared/log', 'a'); f.write('{host}'); f.close()"
        report = await run(services, code, chat_key)
        assert report.error is None, hosts.logs()
        await asyncio.to_thread(hosts.workers[host, "rounds"].stop)
        await asyncio.to_thread(hosts.start, other, "rounds")
    report = await run(services, "print(open('/app/shared/log').read())", chat_key)
    assert report.output == "ab\n"
    assert "ab" in hosts.texts("a")
    assert "ab" in hosts.texts("b")


async def test_a_killed_round_leaves_the_version_of_the_round_before(
    hosts: TwoHosts, services: Services, chat_key: str
) -> None:
    await use_cases.receive_message(services, chat_key, "write it", user_id="u1", user_name="Ada")
    await eventually(lambda: "of a round" in hosts.texts("a"), what=hosts.logs)
    read = "print(open('/app/shared/note.txt').read())"
    assert (await run(services, read, chat_key)).output == "of a round\n"

    await use_cases.receive_message(services, chat_key, "half of it", user_id="u1", user_name="Ada")
    await eventually(lambda: "half" in hosts.texts("a"), what=hosts.logs)
    hosts.workers["a", "rounds"].kill()
    await asyncio.to_thread(hosts.start, "a", "rounds")
    assert (await run(services, read, chat_key)).output == "of a round\n"
    assert "half" not in hosts.texts("a")


async def test_the_model_is_told_what_is_not_kept(hosts: TwoHosts, services: Services, chat_key: str) -> None:
    await use_cases.receive_message(services, chat_key, "leave a link", user_id="u1", user_name="Ada")
    await eventually(lambda: "the model was told" in hosts.texts("a"), what=hosts.logs)


async def test_more_files_than_the_quota_are_an_error_of_the_run(
    hosts: TwoHosts, services: Services, chat_key: str
) -> None:
    report = await run(services, "open('/app/shared/old', 'w').write('old')", chat_key)
    assert report.error is None
    report = await run(services, "[open(f'/app/shared/{n}', 'w') for n in range(30)]", chat_key)
    assert report.stop_type is StopType.ERROR
    report = await run(services, "print(open('/app/shared/old').read())", chat_key)
    assert report.output == "old\n"


async def test_credentials_of_the_store_reach_no_sandbox_file_row_or_log(
    hosts: TwoHosts, services: Services, chat_key: str
) -> None:
    code = """
import glob, os
texts = [repr(dict(os.environ))]
for name in ("environ", "cmdline", "mountinfo"):
    for path in glob.glob(f"/proc/*/{name}") + glob.glob(f"/proc/*/task/*/{name}"):
        try:
            texts.append(open(path, "rb").read().decode("utf-8", "replace"))
        except OSError:
            pass
open("/app/shared/seen", "w").write("\\n".join(texts))
print(len(texts) > 1, [text for text in texts if "AWS_" in text])
"""
    report = await run(services, code, chat_key)
    assert report.error is None, hosts.logs()
    assert report.output == "True []\n"
    report = await run(services, "print(open('/app/shared/' + 'no such').read())", chat_key)
    assert report.error is not None or "FileNotFoundError" in report.output
    files = [path for path in hosts.data_dirs["a"].parent.rglob("*") if path.is_file()]
    assert any(path.name == "nekro.db" for path in files)
    assert any(path.suffix == ".log" for path in files)
    contents = {path: path.read_bytes() for path in files}
    assert [path for path, data in contents.items() if SECRET.encode() in data or KEY.encode() in data] == []
