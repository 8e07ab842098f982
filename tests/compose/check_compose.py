"""Test compose.yaml on a real engine: `make compose-test`, as root on Debian, apart from the test suite.

No image is pulled. Debian's packages make the bases that replace the public images, and the Python packages
come as wheels. Everything that is started is stopped again.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from check_gateway import PLUGIN_HTTP, PORTS, check_gateway

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
CACHE: Final = ROOT / "build" / "compose"
PACKAGES: Final = "python3,python3-venv,bubblewrap,libmagic1,ca-certificates,redis-server,postgresql"
BASE: Final = "nekro-test/debian:bookworm"
PROJECT: Final = "nekrotest"
FLOWER_PORT: Final = 15555


def say(text: str) -> None:
    """Print a progress line."""
    print(f"[{time.monotonic() - BEGIN:6.1f} s] {text}", flush=True)


BEGIN: Final = time.monotonic()


def run(*command: str, **options: Any) -> str:
    """Run a command; returns its output, or exits with it."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, **options
    )
    if done.returncode:
        sys.exit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def wait_for(condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """Poll until a condition holds."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.5)
    return value


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """The engine that DOCKER_HOST names, else a private dockerd without a bridge."""
    if "DOCKER_HOST" in os.environ:
        yield
        return
    directory = Path(tempfile.mkdtemp(prefix="nekro-engine-"))
    socket = f"unix://{directory}/socket"
    with (directory / "log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", "--storage-driver", "overlay2", "--bridge", "none",
             "--data-root", str(directory / "data"),
             "--exec-root", str(directory / "exec"), "--pidfile", str(directory / "pid"), "-H", socket],
            stdout=log, stderr=log,
        )  # fmt: skip
    os.environ["DOCKER_HOST"] = socket
    try:
        wait_for(
            lambda: subprocess.run(["docker", "info"], capture_output=True).returncode == 0,
            seconds=60,
            what="dockerd",
        )
        yield
    finally:
        daemon.terminate()
        daemon.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


def make_bases() -> None:
    """Build the images that replace the public ones."""
    tree = CACHE / "debian"
    if not (tree / "usr/bin/bwrap").exists():
        say("debootstrap")
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        # Otherwise its services would start on this machine.
        (tree / "usr/sbin").mkdir(parents=True)
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(tree))
    say("base images")
    with subprocess.Popen(["tar", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE) as packed:
        run("docker", "import", "-", BASE, stdin=packed.stdout)
    for name in ("redis", "postgres"):
        run("docker", "build", "-q", "-f", str(HERE / f"Dockerfile.{name}"), "-t", f"nekro-test/{name}",
            "--build-arg", f"BASE_IMAGE={BASE}", str(HERE))  # fmt: skip


def make_wheels() -> None:
    """Put every wheel into deploy/wheels; the build has no index."""
    say("wheels")
    target = ROOT / "deploy" / "wheels"
    # pip evaluates markers for this interpreter; Debian's may be an older 3.11, which needs more.
    text = (ROOT / "deploy" / "requirements.txt").read_text()
    asked = CACHE / "requirements.txt"
    asked.write_text(re.sub(r" ; python_full_version < '3\.11\.\d+'", "", text))
    run(sys.executable, "-m", "pip", "download", "-q", "-d", str(target), "--require-hashes",
        "-r", str(asked), cwd=ROOT)  # fmt: skip
    # Of other versions, so apart: the packages that sandboxes can import.
    run(sys.executable, "-m", "pip", "download", "-q", "-d", str(target), "--require-hashes",
        "-r", str(ROOT / "nekro" / "sandbox" / "packages" / "default.txt"), cwd=ROOT)  # fmt: skip
    run(sys.executable, "-m", "pip", "download", "-q", "-d", str(target), "--require-hashes",
        "-r", str(ROOT / "deploy" / "bucket" / "requirements.txt"), cwd=ROOT)  # fmt: skip


class System:
    """The composed system."""

    def __init__(self, secrets: Path) -> None:
        self._secrets = secrets
        #: Files of Compose besides `compose.yaml`.
        self.further: list[Path] = [HERE / "compose.test.yaml"]
        self._environment = {
            **os.environ,
            "WORKERS_SECRETS": str(secrets),
            "WORKERS_IMAGE": "nekro-test/workers",
            "BUCKET_IMAGE": "nekro-test/bucket",
            "AWS_ACCESS_KEY_ID": "nekro",
            "AWS_SECRET_ACCESS_KEY": "of-the-test",
            "WORKERS_BASE_IMAGE": BASE,
            "WORKERS_PIP_ARGUMENTS": "--no-index --find-links /wheels",
            "WORKERS_PLUGINS": str(secrets.parent / "plugins"),
            "REDIS_IMAGE": "nekro-test/redis",
            "POSTGRES_IMAGE": "nekro-test/postgres",
            "FLOWER_PORT": str(FLOWER_PORT),
            "GATEWAY_PORT": f"{PORTS[0]}-{PORTS[-1]}",
            "NEKRO_GATEWAY__PLUGIN_HTTP": PLUGIN_HTTP,
            "NEKRO_LLM__SCRIPT": "/script.yaml",
            # Without the options that are removed below, a container has no control group of its own.
            "NEKRO_SANDBOX__REQUIRE_KERNEL_LIMITS": "false",
            "COMPOSE_HTTP_TIMEOUT": "300",
            # The classic builder: BuildKit is a plugin that Debian's package lacks.
            "DOCKER_BUILDKIT": "0",
        }
        self.file = secrets.parent / "compose.checked.yaml"
        text = (ROOT / "compose.yaml").read_text()
        # Compose 1.29 and Docker 20.10 do not support them.
        for line in (
            "      - systempaths=unconfined",
            "      - writable-cgroups=true",
            "    cgroup: private",
        ):
            text = text.replace(f"{line}\n", "")
        self.file.write_text(text)

    def compose(self, *arguments: str, given: str | None = None) -> str:
        """Run one command of Compose, with ``given`` on its standard input."""
        files = [part for file in (self.file, *self.further) for part in ("-f", str(file))]
        command = ["docker-compose", "--project-directory", str(ROOT), "-p", PROJECT, *files, *arguments]
        return run(*command, env=self._environment, input=given)

    def nekro(self, *arguments: str, service: str = "rounds", given: str | None = None) -> str:
        """Run `nekro` inside a service."""
        return self.compose("exec", "-T", service, "nekro", *arguments, given=given)

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers."""
        return self.compose("ps", "-q", service).split()

    def healthy(self, service: str, count: int) -> bool:
        """Whether so many containers of a service run and pass their health check."""
        ids = self.containers(service)
        form = "{{.State.Health.Status}}"
        states = [run("docker", "inspect", "-f", form, name).strip() for name in ids]
        return states == ["healthy"] * count

    def wait_healthy(self, **counts: int) -> None:
        """Wait until services are healthy."""
        for service, count in counts.items():
            wait_for(
                lambda s=service, c=count: self.healthy(s, c),  # type: ignore[misc]
                seconds=180,
                what=f"{count} healthy {service}",
            )

    def messages(self, chat_key: str) -> list[str]:
        """Texts of a chat."""
        return [message["text"] for message in json.loads(self.nekro("history", chat_key, "--json"))]

    def wait_message(self, chat_key: str, text: str) -> None:
        """Wait until the agent has sent a message."""
        wait_for(lambda: any(text in said for said in self.messages(chat_key)), seconds=60, what=repr(text))

    def figures(self) -> dict[str, float]:
        """Metrics of the fleet, by name and labels."""
        lines = self.nekro("metrics", service="metrics").splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    def take_down(self) -> None:
        """Stop the system and delete its volumes."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "30")


def refuse_without_secrets() -> None:
    """Compose must not start anything before secrets exist."""
    environment: Mapping[str, str] = {k: v for k, v in os.environ.items() if k != "WORKERS_SECRETS"}
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            ["docker-compose", "--project-directory", empty, "-f", str(ROOT / "compose.yaml"), "config"],
            env=environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode != 0 and "make-secrets" in done.stderr, done


def check_turn(system: System, chat_key: str) -> None:
    """A turn of two rounds: sandbox, TOOL, BEHAVIOR and AGENT calls, files, PostgreSQL."""
    system.nekro("send", chat_key, "please file our plan lanterns", "--user-id", "ada")
    system.wait_message(chat_key, "The note says: Plan\nlanterns")
    assert not any("never said" in text for text in system.messages(chat_key))
    shown = json.loads(system.nekro("history", chat_key, "--trace", "--json"))
    calls = [call["method"].rpartition(".")[2] for item in shown["rounds"] for call in item["calls"]]
    assert calls == ["save_note", "view_str_content", "read_note", "send_msg_text"], calls


def check_scale(system: System) -> None:
    """Three methods workers, each of which gets calls."""
    system.compose("up", "-d", "--no-build", "--scale", "methods=3")
    system.wait_healthy(methods=3)
    wait_for(
        lambda: system.figures().get('nekro_lane_workers{lane="methods"}') == 3, seconds=60, what="3 workers"
    )
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool:\n    list(pool.map(lambda _: list_notes(), range(120)))\n"
    )
    result = json.loads(system.nekro("exec", "-", "--user-id", "ada", "--json", given=code))
    workers = {call["worker"] for call in result["calls"]}
    assert len(result["calls"]) == 120 and len(workers) == 3, (result["output"], workers)


def check_redis_restart(system: System) -> None:
    """Messages in Redis survive its restart, and workers reconnect."""
    system.compose("stop", "-t", "40", "rounds")
    system.nekro("send", "second", "please file our plan torches", "--user-id", "ada", service="methods")
    system.compose("restart", "redis")
    system.compose("up", "-d", "--no-build", "--scale", "methods=3")
    system.wait_healthy(redis=1, methods=3, rounds=1)
    system.wait_message("second", "The note says: Plan\ntorches")


def check_sandbox_options() -> None:
    """A sandbox starts under exactly the security options that compose.yaml gives lane rounds."""
    result = subprocess.run(
        ["docker", "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL",
         "--security-opt", "no-new-privileges:true", "--security-opt", f"seccomp={ROOT}/deploy/seccomp.json",
         "--security-opt", "systempaths=unconfined", "--security-opt", "apparmor=unconfined",
         "nekro-test/workers", "doctor", "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert checks["sandbox"]["verdict"] != "failed", checks["sandbox"]
    say(f"sandbox: {checks['sandbox']['detail'][:160]}")
    without = subprocess.run(
        ["docker", "run", "--rm", "nekro-test/workers", "doctor", "--json"], capture_output=True, text=True
    )
    checks = {check["name"]: check for check in json.loads(without.stdout)}
    assert checks["sandbox"]["verdict"] == "failed", checks["sandbox"]


def check_files(system: System) -> None:
    """With compose.files.yaml no two containers share a volume, and files travel through the S3 server."""
    # Compose 1.29 does not support modes, which a container needs that is started a second time.
    file = system.file.with_name("compose.files.yaml")
    file.write_text((ROOT / file.name).read_text().replace("        mode: 1023\n", ""))
    system.further.insert(0, file)
    system.compose("build", "bucket")
    system.compose("up", "-d", "--no-build", "--scale", "methods=2")
    system.wait_healthy(bucket=1, redis=1, postgres=1, methods=2, long=1, rounds=1, pinned=1)
    mounted = [
        {
            mount.get("Name") or mount["Type"]
            for mount in json.loads(run("docker", "inspect", name))[0]["Mounts"]
        }
        for service in ("methods", "long", "rounds", "pinned")
        for name in system.containers(service)
    ]
    names = [name for mounts in mounted for name in mounts - {"bind", "tmpfs"}]
    assert len(names) == len(set(names)) == 5, mounted
    assert "hosts share no disk" in system.nekro("doctor")
    code = """
from concurrent.futures import ThreadPoolExecutor
open("/app/shared/lines", "w").close()
hosts = set()
for _ in range(200):
    answer = count("/app/shared/lines")
    hosts.add(answer["host"])
    if len(hosts) == 2:
        break
print(len(hosts), len(set(open("/app/shared/lines"))), len(set(answer["own"].split())))
"""
    result = json.loads(system.nekro("exec", "-", "--chat-key", "files", "--json", given=code))
    assert result["output"] == "2 2 2\n", result
    system.compose("rm", "--stop", "--force", "-v", "rounds")
    system.compose("up", "-d", "--no-build", "--scale", "methods=2")
    system.wait_healthy(rounds=1)
    again = "print(len(set(open('/app/shared/lines'))))"
    result = json.loads(system.nekro("exec", "-", "--chat-key", "files", "--json", given=again))
    assert result["output"] == "2\n", result
    system.compose("restart", "bucket")
    system.wait_healthy(bucket=1)
    system.nekro("files", "fsck", "--read")
    check_turn(system, "stored")


def check_flower(system: System, secrets: Path) -> None:
    """Flower requires its password and shows all workers."""
    url = f"http://127.0.0.1:{FLOWER_PORT}/api/workers?refresh=1"
    try:
        urllib.request.urlopen(url, timeout=10)
        raise AssertionError("Flower answered without a password")
    except urllib.error.HTTPError as exc:
        assert exc.code == 401, exc.code
    token = base64.b64encode((secrets / "flower_auth").read_bytes()).decode()
    request = urllib.request.Request(url, headers={"Authorization": f"Basic {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        names = json.load(answer)
    assert {name.partition("-")[0] for name in names} == {"methods", "long", "rounds", "pinned"}, list(names)


def check_all(secrets: Path) -> None:
    """Start, use, scale, break, take down."""
    refuse_without_secrets()
    system = System(secrets)
    try:
        say("build")
        system.compose("build", "migrate")
        check_sandbox_options()
        say("up")
        system.compose("up", "-d", "--no-build")
        system.wait_healthy(redis=1, postgres=1, methods=1, long=1, rounds=1, pinned=1, flower=1)
        assert system.compose("exec", "-T", "rounds", "id", "-u").strip() == "10001"
        result = system.compose("exec", "-T", "rounds", "nekro", "doctor")
        assert "redis: " in result and "database: " in result, result
        assert system.compose("logs", "methods").strip()
        say("all healthy; a turn")
        check_turn(system, "first")
        say("Flower")
        check_flower(system, secrets)
        say("two gateways")
        check_gateway(system)
        say("scale methods to 3")
        check_scale(system)
        say("restart Redis with a message waiting")
        check_redis_restart(system)
        say("no shared disk")
        check_files(system)
    except BaseException:
        with contextlib.suppress(BaseException):
            print(system.compose("ps"), system.compose("logs", "--tail", "40"))
        raise
    finally:
        say("take down")
        system.take_down()


def main() -> None:
    """Run the whole test."""
    for tool in ("docker", "docker-compose", "dockerd", "debootstrap"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is missing: apt-get install docker.io docker-compose debootstrap")
    if os.geteuid() != 0:
        sys.exit("run it as root: it starts dockerd and debootstrap")
    with tempfile.TemporaryDirectory(prefix="nekro-compose-") as name, engine():
        secrets = Path(name) / "secrets"
        plugins = Path(name) / "plugins"
        plugins.mkdir()
        shutil.copy(HERE / "where_plugin.py", plugins / "where.py")
        Path(name).chmod(0o755)
        run(str(ROOT / "scripts" / "make-secrets"), str(secrets), env={**os.environ, "WORKERS_SECRETS": "x"})
        make_bases()
        make_wheels()
        check_all(secrets)
    say("all of it holds")


if __name__ == "__main__":
    main()
