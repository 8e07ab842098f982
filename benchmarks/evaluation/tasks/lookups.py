"""Look-ups that need each other's results, in one program or over several rounds."""

from __future__ import annotations

from typing import Final

from benchmarks.evaluation.checks import has_effect, made_call, sends
from benchmarks.evaluation.task import Task, call, program, says, words

__all__ = ["TASKS"]

_ARTICLES: Final = [call("read_article", {"sku": f"A-{number}"}) for number in range(1, 8)]

TASKS: Final = (
    Task(
        name="value_of_orders",
        person=[says("What are all orders of Ada Lovelace worth together, in EUR, whatever their state?")],
        model=[
            program("""
                total = 0
                for order_id in list_orders(find_customer("Ada Lovelace")):
                    for sku, count in read_order(order_id)["articles"].items():
                        total += count * read_article(sku)["price"]
                send_msg_text(_ck, f"The orders of Ada Lovelace are worth {total} EUR.")
            """)
        ],
        tools=[
            call("find_customer", {"name": "Ada Lovelace"}),
            call("list_orders", '{"customer_id": "${id}"}', after=r"(?P<id>C-\d+)"),
            call("read_order", {"order_id": "O-101"}, after="O-101.*O-102.*O-104"),
            call("read_order", {"order_id": "O-102"}),
            call("read_order", {"order_id": "O-104"}),
            *(call("read_article", {"sku": f"A-{number}"}) for number in range(1, 6)),
            call("calculate", {"expression": "2 * 25 + 32 + 3 * 75.5 + 64 + 2 * 180"}),
            words("They are worth ${total} EUR.", after=r"(?P<total>732\.5)"),
        ],
        outcome=[sends(r"732[.,]5")],
    ),
    Task(
        name="chain_of_managers",
        person=[says("Who is at the top above Mia, and how many managers are between them?")],
        model=[
            program("""
                chain = ["Mia"]
                while (manager := manager_of(chain[-1])) is not None:
                    chain.append(manager)
                send_msg_text(_ck, f"At the top is {chain[-1]}, with {len(chain) - 2} managers in between.")
            """)
        ],
        tools=[
            call("manager_of", {"name": "Mia"}),
            call("manager_of", '{"name": "${first}"}', after=r"(?P<first>[A-Z]\w+)"),
            call("manager_of", '{"name": "${second}"}', after=r"(?P<second>[A-Z]\w+)"),
            call("manager_of", '{"name": "${third}"}', after=r"(?P<third>[A-Z]\w+)"),
            words("At the top is ${third}, with 2 managers in between.", after="null"),
        ],
        outcome=[sends(r"\bEva\b", r"\b(2|two)\b")],
    ),
    Task(
        name="dearest_article",
        person=[says("Which article costs the most, and which supplier has it?")],
        model=[
            program("""
                articles = [read_article(sku) for sku in list_articles()]
                dearest = max(articles, key=lambda article: article["price"])
                send_msg_text(_ck, f"The {dearest['name']} of {dearest['supplier']}: {dearest['price']} EUR.")
            """)
        ],
        tools=[call("list_articles"), *_ARTICLES, words("The desk of Holz costs 180 EUR.")],
        outcome=[sends("desk", "Holz")],
    ),
    Task(
        name="restock",
        person=[says("Order 10 pieces of each article of which fewer than 3 are in stock.")],
        model=[
            program("""
                ordered = []
                for sku in list_articles():
                    if read_article(sku)["stock"] < 3:
                        order_stock(sku, 10)
                        ordered.append(sku)
                send_msg_text(_ck, "Ordered 10 of each: " + ", ".join(ordered))
            """)
        ],
        tools=[
            call("list_articles"),
            *_ARTICLES,
            *(call("order_stock", {"sku": sku, "count": 10}) for sku in ("A-2", "A-3", "A-6")),
            words("Ordered 10 of A-2, A-3 and A-6."),
        ],
        outcome=[
            *(has_effect("order", sku=sku, count=10) for sku in ("A-2", "A-3", "A-6")),
            has_effect("order", times=3),
        ],
    ),
    Task(
        name="price_abroad",
        person=[says("What does the carpet (A-7) cost in USD and in CHF?")],
        model=[
            program("""
                price = read_article("A-7")["price"]
                shown = [f"{price * exchange_rate(currency):.2f} {currency}" for currency in ("USD", "CHF")]
                send_msg_text(_ck, f"The carpet costs {' or '.join(shown)}.")
            """)
        ],
        tools=[
            call("read_article", {"sku": "A-7"}),
            call("exchange_rate", {"currency": "USD"}),
            call("exchange_rate", {"currency": "CHF"}, after=r"1\.1"),
            call("calculate", {"expression": "120 * 1.1"}, after=r"0\.95"),
            call("calculate", {"expression": "120 * 0.95"}, after="132"),
            words("The carpet costs 132.00 USD or ${chf}.00 CHF.", after=r"(?P<chf>114)"),
        ],
        outcome=[sends(r"\b132\b", r"\b114\b")],
    ),
    Task(
        name="warmest_city",
        person=[says("Which is the warmest now: Oslo, Rome, Lima, Kyiv or Cairo?")],
        model=[
            program("""
                cities = ["Oslo", "Rome", "Lima", "Kyiv", "Cairo"]
                degrees = {city: temperature(city) for city in cities}
                warmest = max(degrees, key=degrees.get)
                send_msg_text(_ck, f"The warmest is {warmest} with {degrees[warmest]} °C.")
            """)
        ],
        tools=[
            *(call("temperature", {"city": city}) for city in ("Oslo", "Rome", "Lima", "Kyiv", "Cairo")),
            words("The warmest is Cairo with ${degrees} °C.", after=r"(?P<degrees>31)"),
        ],
        outcome=[sends("Cairo", "31")],
    ),
    Task(
        name="keep_a_note",
        person=[says("Save a note 'gate' titled 'Gate code' with the text 4711, then read it back to me.")],
        model=[
            program("""
                save_note("gate", "Gate code", "4711")
                send_msg_text(_ck, read_note("gate"))
            """)
        ],
        tools=[
            call("save_note", {"note_id": "gate", "title": "Gate code", "content": "4711"}),
            call("read_note", {"note_id": "gate"}, after="saved"),
            words("The note: ${text}", after=r"Gate code\s+(?P<text>\d+)"),
        ],
        outcome=[sends("4711"), made_call("nekro.notes.save_note")],
    ),
    Task(
        name="recall_a_preference",
        person=[
            says("Remember that my unit of length is furlong, as the preference unit."),
            says("Which unit did I ask you to remember? Look the preference up."),
        ],
        model=[
            program("""
                set_preference("unit", "furlong")
                send_msg_text(_ck, "I will remember it.")
            """),
            program("send_msg_text(_ck, f\"You prefer the {get_preference('unit')}.\")"),
        ],
        tools=[
            call("set_preference", {"name": "unit", "value": "furlong"}),
            words("I will remember it."),
            call("get_preference", {"name": "unit"}),
            words("You prefer the ${unit}.", after=r"(?P<unit>furlong)"),
        ],
        outcome=[sends("furlong"), made_call("nekro.preferences.get_preference")],
    ),
    Task(
        name="ask_the_handbook",
        person=[says("Which form do I need for a hotel, and what may a night cost? See the handbook.")],
        model=[
            program('search_handbook("hotel")'),
            program(
                'read_handbook("${section}")', after=r"agent_result.*Sections with 'hotel': (?P<section>\w+)"
            ),
            words(
                "You need the form ${form}; a night may cost up to ${limit} EUR.",
                after=r"agent_result.*up to (?P<limit>\d+) EUR.*Form: (?P<form>\S+?)\.",
            ),
        ],
        tools=[
            call("search_handbook", {"word": "hotel"}),
            call(
                "read_handbook", '{"section": "${section}"}', after=r"Sections with 'hotel': (?P<section>\w+)"
            ),
            words(
                "You need the form ${form}; a night may cost up to ${limit} EUR.",
                after=r"up to (?P<limit>\d+) EUR.*Form: (?P<form>\S+?)\.",
            ),
        ],
        outcome=[sends("T-7", "140"), made_call("eval.office.read_handbook")],
    ),
    Task(
        name="look_then_decide",
        person=[says("Turing asks for the state of an order of his. Look who that is, then tell the state.")],
        model=[
            program("""
                print(search_customers("turing"))
                exit(9)
            """),
            program(
                """
                for order_id in list_orders("${id}"):
                    send_msg_text(_ck, f"Order {order_id} is {read_order(order_id)['state']}.")
                """,
                after=r"sandbox_output>.*'id': '(?P<id>C-\d+)'.*Alan Turing",
            ),
        ],
        tools=[
            call("search_customers", {"part": "turing"}),
            call("list_orders", '{"customer_id": "${id}"}', after=r'"id": "(?P<id>C-\d+)"'),
            call("read_order", '{"order_id": "${order}"}', after=r"(?P<order>O-\d+)"),
            words("Order ${order} is ${state}.", after=r'"state": "(?P<state>\w+)"'),
        ],
        outcome=[sends("O-105", "cancel")],
    ),
    Task(
        name="book_a_room",
        person=[says("Book a room for 9 people at 15 o'clock today.")],
        model=[
            program("""
                for room in map(read_room, list_rooms()):
                    if room["seats"] >= 9 and 15 in room["free"]:
                        send_msg_text(_ck, book_room(room["room"], 15))
                        break
                else:
                    send_msg_text(_ck, "No such room is free at 15.")
            """)
        ],
        tools=[
            call("list_rooms"),
            *(call("read_room", {"room": room}) for room in ("Fjord", "Delta", "Canyon", "Lagoon")),
            call("book_room", {"room": "Lagoon", "hour": 15}, after="Lagoon.*15"),
            words("Lagoon is booked at 15."),
        ],
        outcome=[has_effect("booking", room="Lagoon", hour=15), sends("Lagoon")],
    ),
)
