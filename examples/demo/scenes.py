"""The scenes of the tour: what the user Ada writes, and the code that the scripted model answers with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from nekro_agent.files.private_files import write_private

__all__ = [
    "ADA",
    "ASK_CHART",
    "ASK_DRAW",
    "ASK_FETCH",
    "ASK_GREET",
    "ASK_PLAN",
    "BEST_STALL",
    "GREETING",
    "MODEL_NAME",
    "NEVER_FILE",
    "NEVER_SAID",
    "NOTE_TEXTS",
    "PLAN",
    "PLAN_READ",
    "TAKINGS",
    "write_script",
]

ADA: Final = "ada"
PLAN: Final = "The fair opens on the first of May. 屋台は十二軒。 Bring lanterns."
GREETING: Final = "こんにちは"
MODEL_NAME: Final = "tiny"

ASK_PLAN: Final = "Please file our plan for the fair and read it once more."
ASK_DRAW: Final = "Draw the fair for me."
ASK_FETCH: Final = "Fetch the model at {url} please, its SHA-256 is {sha256}."
ASK_GREET: Final = "Is the model there? And greet me the way I like."
ASK_CHART: Final = "Please chart the takings in {path}."
#: The file that Ada uploads with it.
TAKINGS: Final = "屋台,売上\n焼きそば,182\n金魚すくい,240\nりんご飴,131\n"
BEST_STALL: Final = "金魚すくい took the most: 240."

NOTE_TEXTS: Final = tuple(f"Note 'Plan of the fair' {done} as 'fair'." for done in ("saved", "replaced"))
PLAN_READ: Final = "I have read the plan once more."
NEVER_SAID: Final = "This line never runs."
NEVER_FILE: Final = "never.txt"

_PLAN_CODE: Final = f"""\
with open("/app/shared/plan.txt", "w", encoding="utf-8") as file:
    file.write({PLAN!r})
measured = measure_text("/app/shared/plan.txt")
send_msg_text(_ck, f"The plan has {{measured['words']}} words, says process {{measured['process']}}.")
save_note("fair", "Plan of the fair", {PLAN!r})
set_preference("greeting", {GREETING!r})
view_str_content(open("/app/shared/plan.txt", encoding="utf-8").read())
open("/app/shared/{NEVER_FILE}", "w").close()
send_msg_text(_ck, {NEVER_SAID!r})
"""

_DRAW_CODE: Final = """\
draw_picture("fair", size=64)
"""

_DRAWN_CODE: Final = """\
import hashlib
path = save_picture("fair", size=64)
data = open(path, "rb").read()
send_msg_file(_ck, path)
digest = hashlib.sha256(data).hexdigest()
send_msg_text(_ck, f"The picture I saw is {path}, {len(data)} bytes, SHA-256 {digest}.")
"""

_FETCH_CODE: Final = f"""\
download_model("${{url}}", {MODEL_NAME!r}, sha256="${{sha256}}")
"""

_GREET_CODE: Final = f"""\
import hashlib
model = load_model({MODEL_NAME!r}, to_sandbox=True)
digest = hashlib.sha256(open(model["path"], "rb").read()).hexdigest()
greeting = get_preference("greeting")
send_msg_text(_ck, f"{{greeting}}! The model has {{model['size_bytes']}} bytes, SHA-256 {{digest}}.")
"""

#: The figure stays open at the end, so it is sent to the chat.
_CHART_CODE: Final = """\
import matplotlib.pyplot as plt
import pandas as pd

takings = pd.read_csv("${path}")
best = takings.loc[takings["売上"].idxmax()]
send_msg_text(_ck, f"{best['屋台']} took the most: {best['売上']}.")
takings.plot.bar(x="屋台", y="売上", title="Takings of the fair / 売上", rot=0)
plt.tight_layout()
"""

#: First match answers. A prompt contains the earlier scenes as history, so the latest scenes come first.
#: Without code the words are the answer, which is sent to the chat.
_SCRIPT: Final[tuple[tuple[str, int, str, str | None], ...]] = (
    (r"chart the takings in (?P<path>/app/uploads/[^\s<]+\.csv)", 0, "I chart it.", _CHART_CODE),
    (r'<agent_result method="[^"]*view_str_content', 0, PLAN_READ, None),
    (r'<agent_result method="[^"]*draw_picture', 1, "I see the picture.", _DRAWN_CODE),
    (r"Is the model there\?", 0, "I look it up.", _GREET_CODE),
    (
        r"Fetch the model at (?P<url>\S+) please, its SHA-256 is (?P<sha256>\w+)",
        0,
        "I fetch it.",
        _FETCH_CODE,
    ),
    (r"Draw the fair", 0, "I draw.", _DRAW_CODE),
    (r"file our plan", 0, "I file it.", _PLAN_CODE),
)


def _answer(words: str, code: str) -> str:
    return f"{words}\n\n```python\n{code}```\n"


def write_script(path: Path) -> None:
    """Write the model's answers as ``nekro.agent.llm.ScriptedClient`` reads them."""
    entries: list[dict[str, Any]] = [
        {"when": when, "images": images, "answer": words if code is None else _answer(words, code)}
        for when, images, words, code in _SCRIPT
    ]
    write_private(path, yaml.safe_dump(entries, allow_unicode=True, sort_keys=False))
