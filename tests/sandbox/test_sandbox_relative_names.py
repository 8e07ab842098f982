"""Relative names in sandboxed code: they are the chat's shared files, for the code and for the host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sandbox_lab import Lab, answer, as_other_user, lab

from nekro.sandbox.models import StopType

WRITERS = """
import os, shutil, sqlite3, subprocess, zipfile
open('notes.txt', 'w').write('notes')
os.makedirs('plots/deep')
shutil.copy('notes.txt', 'plots/deep/copy.txt')
with sqlite3.connect('x.db') as database:
    database.execute('create table t (a)')
database.close()
with zipfile.ZipFile('all.zip', 'w') as archive:
    archive.write('notes.txt')
subprocess.run(['/bin/sh', '-c', 'echo child > child.txt'], check=True)
for name in ('notes.txt', './notes.txt', '/app/shared/notes.txt', 'shared/notes.txt', './shared/notes.txt'):
    assert open(name).read() == 'notes', name
open('shared/later.txt', 'w').write('later')
assert open('later.txt').read() == 'later'
report(os.getcwd())
"""
WRITTEN = {"all.zip", "child.txt", "later.txt", "notes.txt", "plots/deep/copy.txt", "x.db"}


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


async def test_relative_names_are_shared_files(box: Lab) -> None:
    result = await box.run(WRITERS)
    assert (result.stop_type, result.error, box.reports) == (StopType.NORMAL, None, ["/app/shared"])
    assert files_of(box.shared()) == WRITTEN and not any(path.is_symlink() for path in box.shared().iterdir())


@pytest.mark.usefixtures("other_user")
def test_relative_names_work_for_a_service_that_is_not_root() -> None:
    result = as_other_user({"code": WRITERS})
    assert (result["stop"], result["error"], result["reports"]) == ("NORMAL", None, ["/app/shared"])


async def test_uploads_are_read_and_never_written_by_relative_names(box: Lab) -> None:
    (box.areas.uploads_dir("chat") / "in.txt").write_text("upload")
    result = await box.run(
        "import os\n"
        "print(open('uploads/in.txt').read(), os.listdir('uploads'))\n"
        "for action in (lambda: open('uploads/in.txt', 'a'), lambda: open('uploads/new', 'w'),\n"
        "               lambda: os.unlink('uploads/in.txt'), lambda: os.makedirs('uploads/d')):\n"
        "    try:\n        action()\n        print('done')\n"
        "    except OSError as exc:\n        print(exc.errno in (1, 13, 30))"
    )
    assert result.output == "upload ['in.txt']\nTrue\nTrue\nTrue\nTrue\n"


async def test_the_directory_holds_no_names_that_the_code_did_not_mention(box: Lab) -> None:
    result = await box.run(
        "import os\nopen('/app/shared/a', 'w')\nos.listdir('/app/uploads')\nprint(os.listdir())"
    )
    assert result.output == "['a']\n"


async def test_lists_and_walks_show_each_file_once_and_no_link(box: Lab) -> None:
    result = await box.run(
        "import glob, os, pathlib, shutil\n"
        "os.makedirs('d')\nopen('a.csv', 'w')\nopen('shared/d/b.csv', 'w')\nos.path.exists('uploads')\n"
        "print(os.listdir('shared') == os.listdir(), sorted(os.listdir('.')), sorted(os.listdir(b'.')))\n"
        "print(sorted(entry.name for entry in os.scandir()), sorted(os.listdir(os.open('.', os.O_RDONLY))))\n"
        "print(sorted(name for _, _, names in os.walk('.') for name in names))\n"
        "print(sorted(map(str, pathlib.Path('.').rglob('*.csv'))))\n"
        "print(sorted(glob.glob('**/*.csv', recursive=True)), glob.glob('shared/**/*.csv'))\n"
        "shutil.copytree('.', '/tmp/copy')\nprint(sorted(os.listdir('/tmp/copy')))\n"
        "for name in os.listdir('shared'):\n"
        "    path = f'shared/{name}'\n"
        "    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)\n"
        "print(os.listdir())"
    )
    assert result.output.splitlines() == [
        "True ['a.csv', 'd'] [b'a.csv', b'd']",
        "['a.csv', 'd'] ['a.csv', 'd']",
        "['a.csv', 'b.csv']",
        "['a.csv', 'd/b.csv']",
        "['a.csv', 'd/b.csv'] ['shared/d/b.csv']",
        "['a.csv', 'd']",
        "[]",
    ]


async def test_a_path_in_a_kept_variable_stays_valid(box: Lab) -> None:
    first = await box.run("path = 'shared/x'\nopen(path, 'w').write('x')", keep_bytes=1000)
    assert first.kept is not None
    later = await box.run("print(open(path).read())", keep_bytes=1000, variables=first.kept.values)
    assert later.output == "x\n"


async def test_links_and_directories_of_the_code_with_the_names_of_areas_stay_harmless(box: Lab) -> None:
    (box.areas.uploads_dir("chat") / "in.txt").write_text("upload")
    planted = await box.run(
        "import os\nos.symlink('/etc', 'sha' 'red')\nos.mkdir('up' 'loads')\n"
        "open('up' 'loads/own', 'w').write('own')"
    )
    assert planted.stop_type is StopType.NORMAL
    result = await box.run("open('shared/x', 'w').write('x')\nprint(open('uploads/own').read())")
    assert (result.error, result.output) == (None, "own\n")
    assert (box.shared() / "x").read_text() == "x"


@pytest.mark.parametrize("end", ["", "agent()", "exit(3)", "raise ValueError", "import os; os._exit(0)"])
async def test_the_host_finds_no_link_after_a_run(box: Lab, end: str) -> None:
    await box.run(f"open('shared/x', 'w')\nimport os\nos.listdir('uploads')\n{end}")
    assert [path.name for path in box.shared().iterdir()] == ["x"]


async def test_the_end_of_a_program_leaves_the_names_of_another_process_valid(tmp_path: Path) -> None:
    async with lab(tmp_path, name="both") as box, lab(tmp_path, name="both") as other:
        await names_stay_valid(box, other)


async def names_stay_valid(box: Lab, other: Lab) -> None:
    is_waiting, may_go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        is_waiting.set()
        await may_go_on.wait()

    box.handlers["wait"] = wait
    longer = asyncio.create_task(
        box.run("open('shared/a', 'w').close()\nwait()\nopen('shared/b', 'w').close()\nprint('all')")
    )
    await is_waiting.wait()
    assert (await other.run("open('shared/c', 'w').close()")).error is None
    may_go_on.set()
    result = await longer
    assert (result.output, result.error) == ("all\n", None)
    assert sorted(path.name for path in box.shared().iterdir()) == ["a", "b", "c"]


async def test_relative_files_count_to_the_quota(tmp_path: Path) -> None:
    async with lab(tmp_path, shared_bytes=1 << 20) as box:
        result = await box.run("for i in range(4):\n    open(f'{i}', 'wb').write(b'x' * (1 << 20))")
        used = sum(path.stat().st_size for path in box.shared().iterdir())
    assert result.stop_type is StopType.ERROR and used <= 1 << 20


PLANT = """
for name in ('json', 'traceback', 'linecache', 'threading', 'numpy', 'sitecustomize', 'usercustomize', 're'):
    open(f'{name}.py', 'w').write(f"print('planted {name}')")
open('x.pth', 'w').write("import os; print('planted pth')")
open('evil.py', 'w').write("print('planted evil')")
open('matplotlibrc', 'w').write('backend: module://evil\\n')
open('pyvenv.cfg', 'w').write('home = /app/shared\\n')
"""
#: Without `-P` the code's own processes import from the working directory, as every Python does: 3.13 takes
#: `linecache` for `-c`.
BYSTANDER = """
import json, re, subprocess, sys, threading
own = subprocess.run([sys.executable, '-P', '-c', 'print(6 * 7)'], capture_output=True, text=True)
print(own.stdout.strip())
raise ValueError('for its traceback')
"""


async def test_attack_F12_modules_planted_by_relative_names_are_not_imported(box: Lab) -> None:
    assert (await box.run(PLANT)).output == ""
    for _ in range(2):
        result = await box.run(BYSTANDER)
        assert result.stop_type is StopType.ERROR and "ValueError: for its traceback" in result.output
        assert "42" in result.output and "planted" not in result.output.replace("planted by", "")


async def test_attack_F12_a_package_gets_no_module_of_the_working_directory(box: Lab) -> None:
    code = """
open('optional_codec.py', 'w').write("print('planted')")
import encodings, xml.etree.ElementTree as package
def inside(names):
    exec("try:\\n    import optional_codec\\nexcept ImportError:\\n    print('absent')", names)
inside(dict(vars(package)))
import importlib
inside({'__name__': 'some_package', '__file__': '/usr/lib/some_package.py'})
"""
    assert (await box.run(code)).output == "absent\nabsent\n"


async def test_code_imports_the_modules_that_it_wrote(box: Lab) -> None:
    first = await box.run(
        "import os\nos.makedirs('pack')\nopen('pack/__init__.py', 'w').write('from .inner import value')\n"
        "open('pack/inner.py', 'w').write('import helper\\nvalue = helper.double(2)')\n"
        "open('helper.py', 'w').write('def double(x):\\n    return 2 * x')\n"
        "import helper, pack\nprint(helper.double(21), pack.value)"
    )
    assert first.output == "42 4\n"
    later = await box.run(
        "open('helper.py', 'w').write('def double(x):\\n    return 3 * x')\n"
        "import importlib\nprint(importlib.import_module('helper').double(2))\n"
        "import multiprocessing, helper\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n    print(pool.map(helper.double, [1]))"
    )
    assert later.output == "6\n[3]\n"
    assert not list(box.shared().rglob("__pycache__"))


@pytest.mark.usefixtures("other_user")
@pytest.mark.parametrize("mode", ["own", "other"])
def test_attack_F9_no_special_files_by_relative_names(mode: str) -> None:
    code = (
        "import os\n"
        "for action in (lambda: os.mkfifo('pipe'), lambda: os.mknod('device', 0o20600, os.makedev(1, 5)),\n"
        "               lambda: os.link('/usr/bin/env', 'hard'), lambda: open('/app/x', 'w')):\n"
        "    try:\n        action()\n        report('done')\n"
        "    except OSError:\n        report('refused')"
    )
    result = asyncio.run(answer({"code": code})) if mode == "own" else as_other_user({"code": code})
    assert result["reports"] == ["refused"] * 4
