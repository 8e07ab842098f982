"""Move the packages of a clone to their places below ``nekro/``, once: a commit per step.

Copy this folder out of the repository and run ``python3 move.py CLONE --steps 1,2,3 [--no-commit] [--ruff PATH]``
on a clone without changes. Then install the clone again, because ``bin/nekro`` names the old module.
``check.py CLONE`` finds imports and names that no longer exist, ``pure.py CLONE OLD NEW`` code that changed.
The commit after the moves deletes this folder.
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from engine import Fail, Step, git, log

parser = argparse.ArgumentParser()
parser.add_argument("clone", type=Path)
parser.add_argument("--steps", default="1")
parser.add_argument("--ruff", default=None)
parser.add_argument("--no-commit", action="store_true")
options = parser.parse_args()
root = options.clone.resolve()
ruff = options.ruff or str(root / ".venv/bin/ruff")
if git(root, "status", "--porcelain", "--untracked-files=no"):
    sys.exit("the clone has changes; commit or stash them")
for number in options.steps.split(","):
    module = importlib.import_module(f"step{number}")
    step = Step(root, ruff)
    try:
        module.run(step)
    except Fail as exc:
        sys.exit(f"step {number}: {exc}")
    for note in dict.fromkeys(step.notes):
        log("note:", note)
    if not options.no_commit:
        step.commit(module.MESSAGE)
    log(f"step {number}: done")
