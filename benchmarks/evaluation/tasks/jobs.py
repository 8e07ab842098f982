"""Long work: jobs that wake the agent when they end, wait for a person or fail, and slow methods."""

from __future__ import annotations

from typing import Final

from benchmarks.evaluation.checks import made_call, sends
from benchmarks.evaluation.task import Task, call, program, says, words

__all__ = ["TASKS"]

TASKS: Final = (
    Task(
        name="report",
        person=[says("Have a report on whales written, and tell me how many pages it has.")],
        model=[
            program('send_msg_text(_ck, start_report("whales"))'),
            words("The report on whales has ${pages} pages.", after=r"finished: (?P<pages>\d+) pages"),
        ],
        tools=[
            call("start_report", {"topic": "whales"}),
            call("wait_for_job", {"kind": "report", "name": "whales"}),
            words("The report on whales has ${pages} pages.", after=r"finished: (?P<pages>\d+) pages"),
        ],
        outcome=[sends(r"\b42\b")],
    ),
    Task(
        name="two_reports",
        person=[
            says("Have a report on tides written, then one on moons. How many pages have both together?")
        ],
        model=[
            program('start_report("tides")'),
            program('start_report("moons")', after=r"report on tides is finished: (?P<first>\d+) pages"),
            program(
                'send_msg_text(_ck, f"Together {${first} + ${second}} pages.")',
                after=r"report on moons is finished: (?P<second>\d+) pages",
            ),
        ],
        tools=[
            call("start_report", {"topic": "tides"}),
            call("wait_for_job", {"kind": "report", "name": "tides"}),
            call("start_report", {"topic": "moons"}, after=r"finished: (?P<first>\d+) pages"),
            call("wait_for_job", {"kind": "report", "name": "moons"}),
            call(
                "calculate",
                '{"expression": "${first} + ${second}"}',
                after=r"finished: (?P<second>\d+) pages",
            ),
            words("Together ${sum} pages.", after=r"(?P<sum>\d+)"),
        ],
        outcome=[sends(r"\b70\b")],
    ),
    Task(
        name="confirmed_import",
        person=[
            says("Start the import 'books'. I will tell you later how many rows.", jobs_go_on=True),
            says("Now go on with 300 rows for 'books', and tell me when it has finished."),
        ],
        model=[
            program("""
                start_import("books")
                send_msg_text(_ck, "The import waits for your word.")
            """),
            program('confirm_import("books", 300)'),
            words(
                "The import has finished: ${rows} rows.",
                after=r"import books is finished: (?P<rows>\d+) rows",
            ),
        ],
        tools=[
            call("start_import", {"name": "books"}),
            words("The import waits for your word."),
            call("confirm_import", {"name": "books", "rows": 300}),
            call("wait_for_job", {"kind": "import", "name": "books"}, after="true"),
            words("The import has finished: ${rows} rows.", after=r"finished: (?P<rows>\d+) rows"),
        ],
        outcome=[sends("finished|done|complete", "300"), made_call("eval.works.confirm_import")],
    ),
    Task(
        name="failed_backup",
        person=[says("Back up the volume 'attic' and tell me how it went.")],
        model=[
            program('start_backup("attic")'),
            words("The backup failed: ${why}.", after=r"(?P<why>the volume attic is full)"),
        ],
        tools=[
            call("start_backup", {"volume": "attic"}),
            call("wait_for_job", {"kind": "backup", "name": "attic"}),
            words("The backup failed: ${why}.", after=r"fail: (?P<why>the volume attic is full)"),
        ],
        outcome=[sends("full")],
    ),
    Task(
        name="chain_of_builds",
        person=[
            says("Build hull, then mast of that hull, then sail of that mast. Tell me the mark of the sail.")
        ],
        model=[
            program("""
                mark = ""
                for part in ("hull", "mast", "sail"):
                    mark = build(part, of=mark)
                send_msg_text(_ck, f"The mark of the sail is {mark}.")
            """)
        ],
        tools=[
            call("build", {"part": "hull"}),
            call("build", '{"part": "mast", "of": "${hull}"}', after=r"(?P<hull>hull-\w+)"),
            call("build", '{"part": "sail", "of": "${mast}"}', after=r"(?P<mast>mast-\w+)"),
            words("The mark of the sail is ${sail}.", after=r"(?P<sail>sail-\w+)"),
        ],
        outcome=[sends(r"sail-b5dbe787")],
    ),
)
