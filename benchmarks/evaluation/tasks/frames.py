"""Tables: what a program does with pandas, and tool calling with queries."""

from __future__ import annotations

import io
import zipfile
from typing import Final

from benchmarks.evaluation.checks import delivers, sends
from benchmarks.evaluation.task import Task, call, program, says, words

__all__ = ["TASKS"]

_SALES: Final = """region,month,amount
north,2026-01,120
south,2026-01,90
west,2026-01,40
north,2026-02,80
south,2026-02,150
west,2026-02,60
south,2026-03,30
west,2026-03,75
"""
_STAFF: Final = "id,name,team\n1,Mia,red\n2,Ken,blue\n3,Bo,red\n4,Lis,green\n"
_HOURS: Final = "id,hours\n1,30\n1,12\n2,44\n3,9\n4,21\n2,3\n"
_GAPS: Final = "day,wind,rain\n1,4.5,\n2,,1.0\n3,6.0,0\n4,,\n5,3.5,2.5\n"
_TWICE: Final = "mail,name\na@x,Ann\nb@x,Bob\na@x,Ann\nc@x,Cy\nb@x,Bob\n"
_VISITS: Final = "date,visitors\n2026-04-01,10\n2026-04-03,14\n2026-04-11,9\n2026-04-12,30\n2026-04-15,2\n"
_RUNS: Final = "runner,km\nUma,8\nIvo,21\nNat,13\nZoe,34\nRex,5\nAmy,26\n"
#: The names of its columns cannot be guessed.
_EXPORT: Final = "k_nr,bez_lang,mge_st\n7,bolt M4,310\n8,bolt M5,95\n9,nut M4,410\n"

_SEND: Final = '{"chat_key": "${chat}", "file_path": "${path}"}'
_PATH: Final = r"(?P<path>/app/\w+/[\w.]+)"


def _is_sheet_with_total(content: bytes) -> bool:
    with zipfile.ZipFile(io.BytesIO(content)) as book:
        names = book.namelist()
        return any(name.startswith("xl/worksheets/") for name in names) and any(
            b"645" in book.read(name) for name in names if name.startswith("xl/")
        )


def _is_table_with_total(content: bytes) -> bool:
    return (content.startswith(b"PK") and _is_sheet_with_total(content)) or b"645" in content


def _has_pivot(content: bytes) -> bool:
    text = content.decode()
    return all(name in text for name in ("north", "south", "west", "2026-03")) and "150" in text


TASKS: Final = (
    Task(
        name="best_region",
        person=[says("Which region sold the most in all, and how much?", sales_csv=_SALES)],
        model=[
            program("""
                import pandas as pd
                sums = pd.read_csv("/app/uploads/sales.csv").groupby("region")["amount"].sum()
                send_msg_text(_ck, f"{sums.idxmax()} sold the most: {sums.max()}.")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/sales.csv", "most": 200}),
            call(
                "query_table",
                {
                    "path": "/app/uploads/sales.csv",
                    "sql": "SELECT region, SUM(amount) AS total FROM t GROUP BY region ORDER BY total DESC",
                },
                after="region,month,amount",
            ),
            words(
                "${region} sold the most: ${total}.",
                after=r'"region": "(?P<region>\w+)", "total": (?P<total>\d+)',
            ),
        ],
        outcome=[sends("south", "270")],
    ),
    Task(
        name="hours_by_team",
        person=[
            says("How many hours has each team worked?", staff_csv=_STAFF, hours_csv=_HOURS),
        ],
        model=[
            program("""
                import pandas as pd
                staff = pd.read_csv("/app/uploads/staff.csv")
                hours = pd.read_csv("/app/uploads/hours.csv")
                sums = staff.merge(hours, on="id").groupby("team")["hours"].sum()
                send_msg_text(_ck, "\\n".join(f"{team}: {total} hours" for team, total in sums.items()))
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/staff.csv", "most": 200}),
            call("read_file", {"path": "/app/uploads/hours.csv", "most": 200}, after="id,name,team"),
            call(
                "query_table",
                {
                    "path": "/app/uploads/staff.csv",
                    "other": "/app/uploads/hours.csv",
                    "sql": "SELECT team, SUM(hours) AS total FROM t JOIN u ON t.id = u.id GROUP BY team",
                },
                after="id,hours",
            ),
            words(
                "blue: ${blue} hours\ngreen: ${green} hours\nred: ${red} hours",
                after=r"blue\D+(?P<blue>\d+).*green\D+(?P<green>\d+).*red\D+(?P<red>\d+)",
            ),
        ],
        outcome=[sends(r"red\W+51", r"blue\W+47", r"green\W+21")],
    ),
    Task(
        name="sheet_with_total",
        person=[
            says(
                "Make an Excel sheet of this with a row 'total' at the end, and send it (CSV if Excel is not "
                "possible).",
                sales_csv=_SALES,
            )
        ],
        model=[
            program("""
                import pandas as pd
                sales = pd.read_csv("/app/uploads/sales.csv")
                sales.loc[len(sales)] = ["total", "", sales["amount"].sum()]
                sales.to_excel("/app/shared/sales.xlsx", index=False)
                send_msg_file(_ck, "/app/shared/sales.xlsx")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/sales.csv", "most": 200}),
            call(
                "save_query",
                {
                    "path": "/app/uploads/sales.csv",
                    "name": "sales_total.csv",
                    "sql": "SELECT * FROM t UNION ALL SELECT 'total', '', SUM(amount) FROM t",
                },
                after="region,month,amount",
            ),
            call("send_msg_file", _SEND, after=_PATH),
            words("Excel is not possible here; this is a CSV file."),
        ],
        outcome=[delivers(r"\.(xlsx|csv)$", _is_table_with_total)],
    ),
    Task(
        name="pivot",
        person=[
            says("Pivot this: a row per region, a column per month. Send me the CSV file.", sales_csv=_SALES)
        ],
        model=[
            program("""
                import pandas as pd
                sales = pd.read_csv("/app/uploads/sales.csv")
                table = sales.pivot_table(index="region", columns="month", values="amount", aggfunc="sum")
                table.to_csv("/app/shared/pivot.csv")
                send_msg_file(_ck, "/app/shared/pivot.csv")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/sales.csv"}),
            call(
                "save_query",
                {
                    "path": "/app/uploads/sales.csv",
                    "name": "pivot.csv",
                    "sql": "SELECT region, SUM(CASE month WHEN '2026-01' THEN amount END) AS \"2026-01\", "
                    "SUM(CASE month WHEN '2026-02' THEN amount END) AS \"2026-02\", "
                    "SUM(CASE month WHEN '2026-03' THEN amount END) AS \"2026-03\" FROM t GROUP BY region",
                },
                after="2026-03",
            ),
            call("send_msg_file", _SEND, after=_PATH),
            words("Here it is."),
        ],
        outcome=[delivers(r"\.csv$", _has_pivot)],
    ),
    Task(
        name="missing_values",
        person=[says("How many values are missing in each column?", weather_csv=_GAPS)],
        model=[
            program("""
                import pandas as pd
                missing = pd.read_csv("/app/uploads/weather.csv").isna().sum()
                send_msg_text(_ck, ", ".join(f"{column}: {count}" for column, count in missing.items()))
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/weather.csv", "most": 100}),
            call(
                "query_table",
                {
                    "path": "/app/uploads/weather.csv",
                    "sql": "SELECT SUM(day IS NULL) AS day, SUM(wind IS NULL) AS wind, "
                    "SUM(rain IS NULL) AS rain FROM t",
                },
                after="day,wind,rain",
            ),
            words(
                "day: 0, wind: ${wind}, rain: ${rain}",
                after=r'"wind": (?P<wind>\d), "rain": (?P<rain>\d)',
            ),
        ],
        outcome=[sends(r"wind\W+2", r"rain\W+2")],
    ),
    Task(
        name="duplicates",
        person=[says("Remove the rows that occur twice and send me the rest as CSV.", people_csv=_TWICE)],
        model=[
            program("""
                import pandas as pd
                people = pd.read_csv("/app/uploads/people.csv")
                unique = people.drop_duplicates()
                unique.to_csv("/app/shared/unique.csv", index=False)
                send_msg_file(_ck, "/app/shared/unique.csv")
                send_msg_text(_ck, f"Removed {len(people) - len(unique)} rows.")
            """)
        ],
        tools=[
            call(
                "save_query",
                {
                    "path": "/app/uploads/people.csv",
                    "name": "unique.csv",
                    "sql": "SELECT DISTINCT * FROM t",
                },
            ),
            call("send_msg_file", _SEND, after=_PATH),
            words("Here are the rest."),
        ],
        outcome=[
            delivers(r"\.csv$", lambda content: len(content.split()) == 4 and content.count(b"a@x") == 1)
        ],
    ),
    Task(
        name="look_at_the_head",
        person=[says("How many bolts do we have in this export, all sizes together?", export_csv=_EXPORT)],
        model=[
            program("""
                import pandas as pd
                print(pd.read_csv("/app/uploads/export.csv").head())
                exit(9)
            """),
            program(
                """
                import pandas as pd
                export = pd.read_csv("/app/uploads/export.csv")
                bolts = export[export["${name}"].str.startswith("bolt")]["${count}"].sum()
                send_msg_text(_ck, f"There are {bolts} bolts.")
                """,
                after=r"<sandbox_output>\s+k_nr\s+(?P<name>bez_lang)\s+(?P<count>mge_st).*bolt M4",
            ),
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/export.csv", "most": 300}),
            call(
                "query_table",
                {
                    "path": "/app/uploads/export.csv",
                    "sql": "SELECT SUM(mge_st) AS bolts FROM t WHERE bez_lang LIKE 'bolt%'",
                },
                after="bez_lang,mge_st",
            ),
            words("There are ${bolts} bolts.", after=r'"bolts": (?P<bolts>\d+)'),
        ],
        outcome=[sends(r"\b405\b")],
    ),
    Task(
        name="top_three",
        person=[says("Name the three with the most km, in order, with their km.", runs_csv=_RUNS)],
        model=[
            program("""
                import pandas as pd
                best = pd.read_csv("/app/uploads/runs.csv").nlargest(3, "km")
                send_msg_text(_ck, best.to_string(index=False))
            """)
        ],
        tools=[
            call(
                "query_table",
                {"path": "/app/uploads/runs.csv", "sql": "SELECT * FROM t ORDER BY km DESC LIMIT 3"},
            ),
            words("Zoe 34, Amy 26, Ivo 21", after="Zoe.*Amy.*Ivo"),
        ],
        outcome=[sends(r"(?s)Zoe.*34.*Amy.*26.*Ivo.*21")],
    ),
    Task(
        name="longest_gap",
        person=[
            says(
                "Which is the longest time without a row, in days, and from when to when?", visits_csv=_VISITS
            )
        ],
        model=[
            program("""
                import pandas as pd
                dates = pd.read_csv("/app/uploads/visits.csv", parse_dates=["date"])["date"]
                gaps = dates.diff()
                at = gaps.idxmax()
                first, last = (dates[at - 1], dates[at])
                send_msg_text(_ck, f"{gaps[at].days} days, from {first:%Y-%m-%d} to {last:%Y-%m-%d}.")
            """)
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/visits.csv", "most": 100}),
            call(
                "query_table",
                {
                    "path": "/app/uploads/visits.csv",
                    "sql": "SELECT date, LAG(date) OVER (ORDER BY date) AS before, julianday(date) - "
                    "julianday(LAG(date) OVER (ORDER BY date)) AS days FROM t ORDER BY days DESC LIMIT 1",
                },
                after="date,visitors",
            ),
            words(
                "${days} days, from ${first} to ${last}.",
                after=r'"date": "(?P<last>[\d-]+)", "before": "(?P<first>[\d-]+)", "days": (?P<days>\d+)',
            ),
        ],
        outcome=[sends(r"\b(8|eight)\b", "0?3", "11")],
    ),
)
