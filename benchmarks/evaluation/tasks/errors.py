"""Errors to recover from: what went wrong is read from the prompt, and the next answer is another one."""

from __future__ import annotations

from typing import Final

from benchmarks.evaluation.checks import delivers, has_effect, sends
from benchmarks.evaluation.task import Task, call, program, raw, says, words

__all__ = ["TASKS"]

_STOCK: Final = "Article,Price (EUR),Pieces\nsoap,2.5,40\ntowel,9,12\n"
_LATIN: Final = "Müller;Köln\nJosé;Málaga\n".encode("latin-1")

TASKS: Final = (
    Task(
        name="wrong_column",
        person=[says("What is the stock worth (price times pieces)?", stock_csv=_STOCK)],
        model=[
            program("""
                import pandas as pd
                stock = pd.read_csv("/app/uploads/stock.csv")
                send_msg_text(_ck, f"The stock is worth {(stock['price'] * stock['pieces']).sum()} EUR.")
            """),
            program(
                """
                import pandas as pd
                stock = pd.read_csv("/app/uploads/stock.csv")
                print(list(stock.columns))
                exit(9)
                """,
                after=r"ended with an error.*KeyError: '(?P<wrong>price)'",
            ),
            program(
                """
                import pandas as pd
                stock = pd.read_csv("/app/uploads/stock.csv")
                send_msg_text(_ck, f"The stock is worth {(stock['${price}'] * stock['${count}']).sum()} EUR.")
                """,
                after=r"'Article', '(?P<price>Price \(EUR\))', '(?P<count>Pieces)'",
            ),
        ],
        tools=[
            call(
                "query_table",
                {"path": "/app/uploads/stock.csv", "sql": "SELECT SUM(price * pieces) AS worth FROM t"},
            ),
            call(
                "read_file", {"path": "/app/uploads/stock.csv", "most": 200}, after="error: .*no such column"
            ),
            call(
                "query_table",
                {
                    "path": "/app/uploads/stock.csv",
                    "sql": 'SELECT SUM("Price (EUR)" * Pieces) AS worth FROM t',
                },
                after=r"Price \(EUR\),Pieces",
            ),
            words("The stock is worth ${worth} EUR.", after=r'"worth": (?P<worth>[\d.]+)'),
        ],
        outcome=[sends(r"\b208")],
    ),
    Task(
        name="syntax_error",
        person=[says("List the prime numbers below 30.")],
        model=[
            program("""
                primes = [n for n in range(2, 30) if all(n % d for d in range(2, n)]
                send_msg_text(_ck, ", ".join(map(str, primes)))
            """),
            program(
                """
                primes = [n for n in range(2, 30) if all(n % d for d in range(2, n))]
                send_msg_text(_ck, ", ".join(map(str, primes)))
                """,
                after=r"SyntaxError.*(?P<mark>\]|\))",
            ),
        ],
        tools=[words("2, 3, 5, 7, 11, 13, 17, 19, 23, 29")],
        outcome=[sends("2, 3, 5, 7, 11, 13, 17, 19, 23,? (and )?29")],
    ),
    Task(
        name="misspelt_name",
        person=[says("How many orders has Grace Hoper?")],
        model=[
            program("""
                orders = list_orders(find_customer("Grace Hoper"))
                send_msg_text(_ck, f"Grace Hoper has {len(orders)} orders.")
            """),
            program(
                """
                found = search_customers("Grace")
                orders = list_orders(found[0]["id"])
                send_msg_text(_ck, f"{found[0]['name']} has {len(orders)} order.")
                """,
                after=r"there is no customer 'Grace Hoper'; (?P<hint>search_customers) finds",
            ),
        ],
        tools=[
            call("find_customer", {"name": "Grace Hoper"}),
            call("search_customers", {"part": "Grace"}, after="error: .*search_customers finds"),
            call("list_orders", '{"customer_id": "${id}"}', after=r'"id": "(?P<id>C-\d+)"'),
            words("Grace Hopper has 1 order.", after="O-103"),
        ],
        outcome=[sends("Hopper", r"\b(1|one|an) order")],
    ),
    Task(
        name="wrong_encoding",
        person=[says("Which people are in this file, and where do they live?", people_txt=_LATIN)],
        model=[
            program("""
                for line in open("/app/uploads/people.txt"):
                    name, city = line.strip().split(";")
                    send_msg_text(_ck, f"{name} lives in {city}.")
            """),
            program(
                """
                for line in open("/app/uploads/people.txt", encoding="latin-1"):
                    name, city = line.strip().split(";")
                    send_msg_text(_ck, f"{name} lives in {city}.")
                """,
                after="UnicodeDecodeError",
            ),
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/people.txt"}),
            call(
                "read_file",
                {"path": "/app/uploads/people.txt", "encoding": "latin-1"},
                after="error: .*UnicodeDecodeError|error: .*decode",
            ),
            words("Müller lives in Köln, José lives in Málaga.", after="Müller;Köln"),
        ],
        outcome=[sends("Müller", "Köln", "José", "Málaga")],
    ),
    Task(
        name="wrong_argument",
        person=[says("Order 4 more clocks (A-4) and 2 more desks (A-2), and tell me what you ordered.")],
        model=[
            program("""
                first = order_stock("A-4", count=4)
                second = order_stock("A-2", pieces=2)
                send_msg_text(_ck, first + secnd)
            """),
            program(
                """
                first = order_stock("A-4", count=4)
                second = order_stock("A-2", count=2)
                send_msg_text(_ck, f"{first} {second}")
                """,
                # What failed is said before anything was ordered, so the clocks are ordered once.
                after=r"line 2: order_stock.*'count'\s+line 3: name 'secnd' is not defined",
            ),
        ],
        tools=[
            call("order_stock", {"sku": "A-4", "count": 4}),
            call("order_stock", {"sku": "A-2", "pieces": 2}, after="Ordered 4 of A-4"),
            call("order_stock", {"sku": "A-2", "count": 2}, after="error: .*count"),
            words("Ordered 4 clocks and 2 desks.", after="Ordered 2 of A-2"),
        ],
        outcome=[
            has_effect("order", sku="A-4", count=4),
            has_effect("order", sku="A-2", count=2),
            has_effect("order", times=2),
            sends("4", "2"),
        ],
    ),
    Task(
        name="no_network",
        person=[says("What is 250 EUR in Japanese yen now?")],
        model=[
            program("""
                import urllib.request
                page = urllib.request.urlopen("https://rates.example.org/EUR/JPY", timeout=5).read()
                send_msg_text(_ck, f"250 EUR are {250 * float(page):.0f} JPY.")
            """),
            program(
                "send_msg_text(_ck, f\"250 EUR are {250 * exchange_rate('JPY'):.0f} JPY.\")",
                after="(?P<error>URLError|OSError|PermissionError|gaierror)",
            ),
        ],
        tools=[
            call("exchange_rate", {"currency": "JPY"}),
            call("calculate", {"expression": "250 * 160"}, after="160"),
            words("250 EUR are ${yen} JPY.", after=r"(?P<yen>40000)"),
        ],
        outcome=[sends(r"40[,. ]?000")],
    ),
    Task(
        name="file_elsewhere",
        person=[
            says("Send me the second line of the report that I sent.", q3_report_txt="first\nsecond\nthird\n")
        ],
        model=[
            program("""
                lines = open("/app/uploads/report.txt").read().split("\\n")
                send_msg_text(_ck, lines[1])
            """),
            program(
                """
                import os
                (name,) = (name for name in os.listdir("/app/uploads") if "report" in name)
                send_msg_text(_ck, open(f"/app/uploads/{name}").read().split("\\n")[1])
                """,
                after=r"FileNotFoundError.*'/app/uploads/report\.txt'",
            ),
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/report.txt"}),
            call("list_files", after="error: .*there is no file"),
            call("read_file", '{"path": "${path}"}', after=r"(?P<path>/app/uploads/\w*report\.txt)"),
            words("${line}", after=r"first\s+(?P<line>second)"),
        ],
        outcome=[sends(r"\bsecond\b")],
    ),
    Task(
        name="tool_notation",
        person=[says("What is the temperature in Rome?")],
        model=[
            raw('<tool_call>\n{"name": "temperature", "arguments": {"city": "Rome"}}\n</tool_call>'),
            program(
                "send_msg_text(_ck, f\"In Rome it is {temperature('Rome')} °C.\")",
                after="one block of Python that calls them as functions",
            ),
        ],
        tools=[
            call("temperature", {"city": "Rome"}),
            words("In Rome it is ${degrees} °C.", after=r"(?P<degrees>19)"),
        ],
        outcome=[sends(r"\b19\b")],
    ),
    Task(
        name="read_only_area",
        person=[says("Add the line 'four' to this list and send it back.", numbers_txt="one\ntwo\nthree\n")],
        model=[
            program("""
                with open("/app/uploads/numbers.txt", "a") as file:
                    file.write("four\\n")
                send_msg_file(_ck, "/app/uploads/numbers.txt")
            """),
            program(
                """
                text = open("/app/uploads/numbers.txt").read() + "four\\n"
                with open("/app/shared/numbers.txt", "w") as file:
                    file.write(text)
                send_msg_file(_ck, "/app/shared/numbers.txt")
                """,
                after=r"Read-only file system|PermissionError",
            ),
        ],
        tools=[
            call("read_file", {"path": "/app/uploads/numbers.txt"}),
            call("write_file", {"name": "numbers_4.txt", "text": "one\ntwo\nthree\nfour\n"}, after="three"),
            call(
                "send_msg_file",
                '{"chat_key": "${chat}", "file_path": "${path}"}',
                after=r"(?P<path>/app/\w+/\S+\.txt)",
            ),
            words("Here it is."),
        ],
        outcome=[delivers("numbers", lambda content: content.split() == [b"one", b"two", b"three", b"four"])],
    ),
)
