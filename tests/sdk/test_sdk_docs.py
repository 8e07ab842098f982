"""The example of ``docs/plugins.md``, run as written."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"


async def test_the_documented_plugin_passes_its_documented_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin_code, test_code = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    (tmp_path / "greeter.py").write_text(plugin_code, "utf-8")
    (tmp_path / "documented_case.py").write_text(test_code, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        case = importlib.import_module("documented_case")
        await case.test_greeting(tmp_path / "data")
    finally:
        for name in ("greeter", "documented_case"):
            sys.modules.pop(name, None)
