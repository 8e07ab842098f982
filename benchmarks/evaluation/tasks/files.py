"""Files that people upload, and files that they get."""

from __future__ import annotations

import json
from typing import Final

from benchmarks.evaluation.checks import delivers, sends
from benchmarks.evaluation.task import Task, call, program, says, words

__all__ = ["TASKS"]

_LOG: Final = "".join(
    f"2026-05-{day:02d} {'ERROR disk full' if day % 6 == 0 else 'INFO backup done'} host-{day % 3}\n"
    for day in range(1, 29)
)
_GUESTS: Final = "Mia\nKen\nBo\nMia\nLis\n"
_MORE_GUESTS: Final = "Tom\nBo\nEva\n"
_MERGED: Final = "Bo\nEva\nKen\nLis\nMia\nTom\n"
_POEM: Final = "春の海\nひねもすのたり\nのたりかな\n"
_SETTINGS: Final = "# limits\nmax = 20\nname = blue whale\n\n# mail\nhost = localhost\n"


def _is_inventory(content: bytes) -> bool:
    rows = json.loads(content)
    return [row["item"] for row in rows] == ["nail", "screw"] and int(rows[1]["count"]) == 250


TASKS: Final = (
    Task(
        name="sum_of_prices",
        person=[says("What is the sum of the prices in this file?", prices_txt="12.50\n7.25\n30\n4.05\n")],
        model=[
            program("""
                with open("/app/uploads/prices.txt") as file:
                    total = sum(float(line) for line in file if line.strip())
                send_msg_text(_ck, f"The sum is {total:.2f}.")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/prices.txt"}),
            call("calculate", {"expression": "12.50 + 7.25 + 30 + 4.05"}, after=r"4\.05"),
            words("The sum is ${sum}.", after=r"(?P<sum>53\.8)"),
        ],
        outcome=[sends(r"53[.,]8")],
    ),
    Task(
        name="count_errors",
        person=[says("How many ERROR lines has this log, and on which day is the last one?", app_log=_LOG)],
        model=[
            program("""
                lines = [line for line in open("/app/uploads/app.log") if " ERROR " in line]
                send_msg_text(_ck, f"{len(lines)} errors, the last one on {lines[-1].split()[0]}.")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/app.log"}),
            words("4 errors, the last one on ${day}.", after=r".*(?P<day>2026-05-\d\d) ERROR"),
        ],
        outcome=[sends(r"\b(4|four)\b", "2026-05-24|24 May|May 24")],
    ),
    Task(
        name="csv_to_json",
        person=[
            says(
                "Please convert this to a JSON file with a list of objects, and send it to me.",
                stock_csv="item,count\nnail,1200\nscrew,250\n",
            )
        ],
        model=[
            program("""
                import csv, json
                with open("/app/uploads/stock.csv", newline="") as file:
                    rows = list(csv.DictReader(file))
                with open("/app/shared/stock.json", "w") as file:
                    json.dump(rows, file, indent=2)
                send_msg_file(_ck, "/app/shared/stock.json")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/stock.csv"}),
            call(
                "write_file",
                {
                    "name": "stock.json",
                    "text": '[{"item": "nail", "count": "1200"}, {"item": "screw", "count": "250"}]',
                },
            ),
            call(
                "send_msg_file",
                '{"chat_key": "${chat}", "file_path": "${path}"}',
                after=r"(?P<path>/app/\w+/\S+\.json)",
            ),
            words("Here it is."),
        ],
        outcome=[delivers(r"\.json$", _is_inventory)],
    ),
    Task(
        name="merge_lists",
        person=[
            says(
                "Merge these two lists of guests: each name once, sorted, one per line. Send me the file.",
                guests_txt=_GUESTS,
                more_txt=_MORE_GUESTS,
            )
        ],
        model=[
            program("""
                names = set()
                for name in ("guests", "more"):
                    names |= set(open(f"/app/uploads/{name}.txt").read().split())
                with open("/app/shared/all_guests.txt", "w") as file:
                    file.writelines(f"{name}\\n" for name in sorted(names))
                send_msg_file(_ck, "/app/shared/all_guests.txt")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/guests.txt"}),
            call("read_file", {"path": "/app/uploads/more.txt"}),
            call("write_file", {"name": "all_guests.txt", "text": _MERGED}),
            call(
                "send_msg_file",
                '{"chat_key": "${chat}", "file_path": "${path}"}',
                after=r"(?P<path>/app/\w+/\S+\.txt)",
            ),
            words("Here they are."),
        ],
        outcome=[delivers(r"\.txt$", lambda content: content.decode().split() == _MERGED.split())],
    ),
    Task(
        name="kept_file",
        person=[
            says("Write the line 'tide at 06:40' into a file tides.txt in /app/shared."),
            says("Add the line 'tide at 19:05' to tides.txt and send me the file."),
        ],
        model=[
            program("""
                with open("/app/shared/tides.txt", "w") as file:
                    file.write("tide at 06:40\\n")
                send_msg_text(_ck, "tides.txt has its first line.")
            """),
            program("""
                with open("/app/shared/tides.txt", "a") as file:
                    file.write("tide at 19:05\\n")
                send_msg_file(_ck, "/app/shared/tides.txt")
            """),
        ],
        tools=[
            call("write_file", {"name": "tides.txt", "text": "tide at 06:40\n"}),
            words("tides.txt has its first line.", after=r"(?P<first>/app/\w+/tides\.txt)"),
            call("read_file", '{"path": "${first}"}'),
            call(
                "write_file",
                {"name": "tides_2.txt", "text": "tide at 06:40\ntide at 19:05\n"},
                after="06:40",
            ),
            call(
                "send_msg_file",
                '{"chat_key": "${chat}", "file_path": "${path}"}',
                after=r"(?P<path>/app/\w+/\S+\.txt)",
            ),
            words("Here it is."),
        ],
        outcome=[delivers("tides", lambda content: b"06:40" in content and b"19:05" in content)],
    ),
    Task(
        name="look_at_a_form",
        person=[says("Here are settings. What is the name, and the double of max?", app_ini=_SETTINGS)],
        model=[
            program("""
                print(open("/app/uploads/app.ini").read()[:500])
                exit(9)
            """),
            program(
                """
                pairs = dict(
                    (part.strip() for part in line.split("=", 1))
                    for line in open("/app/uploads/app.ini") if "=" in line
                )
                double = int(pairs["max"]) * 2
                send_msg_text(_ck, f"The name is {pairs['name']}, the double of max is {double}.")
                """,
                after=r"<sandbox_output>.*max = 20",
            ),
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/app.ini"}),
            words(
                "The name is ${name}, the double of max is 40.", after=r"max = 20\s+name = (?P<name>[a-z ]+)"
            ),
        ],
        outcome=[sends("blue whale", r"\b40\b")],
    ),
    Task(
        name="japanese_text",
        person=[
            says("Which line of this text is the longest, and how many characters has it?", haiku_txt=_POEM)
        ],
        model=[
            program("""
                lines = open("/app/uploads/haiku.txt", encoding="utf-8").read().split()
                longest = max(lines, key=len)
                send_msg_text(_ck, f"「{longest}」 with {len(longest)} characters.")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/haiku.txt"}),
            words("「${line}」 with 7 characters.", after="(?P<line>ひねもすのたり)"),
        ],
        outcome=[sends("ひねもすのたり", r"\b(7|seven)\b")],
    ),
    Task(
        name="checklist",
        person=[
            says("Write a Markdown checklist (`- [ ] …`) of: tent, stove, map. Send it as checklist.md.")
        ],
        model=[
            program("""
                things = ["tent", "stove", "map"]
                with open("/app/shared/checklist.md", "w") as file:
                    file.write("# Checklist\\n\\n" + "".join(f"- [ ] {thing}\\n" for thing in things))
                send_msg_file(_ck, "/app/shared/checklist.md")
            """)
        ],
        tools=[
            call(
                "write_file",
                {"name": "checklist.md", "text": "# Checklist\n\n- [ ] tent\n- [ ] stove\n- [ ] map\n"},
            ),
            call(
                "send_msg_file",
                '{"chat_key": "${chat}", "file_path": "${path}"}',
                after=r"(?P<path>/app/\w+/\S+\.md)",
            ),
            words("Here it is."),
        ],
        outcome=[delivers(r"\.md$", lambda content: content.lower().count(b"- [ ]") == 3)],
    ),
)
