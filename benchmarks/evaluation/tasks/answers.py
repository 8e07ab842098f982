"""Answers that need no method: words, other languages than Python, silence, and what was said before."""

from __future__ import annotations

from typing import Final

from benchmarks.evaluation.checks import sends, sends_nothing
from benchmarks.evaluation.task import Task, call, empty, program, raw, says, words

__all__ = ["TASKS"]

TASKS: Final = (
    Task(
        name="greet",
        person=[says("Hello! Please greet me with the word 'welcome'.")],
        model=[words("Welcome, Ada! What can I do for you?")],
        tools=[words("Welcome, Ada! What can I do for you?")],
        outcome=[sends("welcome")],
    ),
    Task(
        name="sql_snippet",
        person=[says("Show me, as a code block, an SQL query for the ten newest rows of the table visits.")],
        model=[
            words("""
                Like this, if the rows have a date:

                ```sql
                SELECT * FROM visits ORDER BY visited_at DESC LIMIT 10;
                ```
            """)
        ],
        tools=[words("```sql\nSELECT * FROM visits ORDER BY visited_at DESC LIMIT 10;\n```")],
        outcome=[sends("select", "visits", "limit 10")],
    ),
    Task(
        name="translate",
        person=[says("Translate into English, one sentence: 明日は雨が降るので、傘を持ってきてください。")],
        model=[words("It will rain tomorrow, so please bring an umbrella.")],
        tools=[words("It will rain tomorrow, so please bring an umbrella.")],
        outcome=[sends("umbrella", "tomorrow")],
    ),
    Task(
        name="remember_words",
        person=[
            says("My cat is called Pixel. Just say that you noted it."),
            says("What is my cat called?"),
        ],
        model=[
            words("Noted: your cat is called Pixel."),
            words("Your cat is called ${cat}.", after=r"My cat is called (?P<cat>\w+)"),
        ],
        tools=[words("Noted: your cat is called Pixel."), words("Your cat is called Pixel.")],
        outcome=[sends(r"called Pixel|Pixel is|'Pixel'|\bPixel\b")],
    ),
    Task(
        name="keep_silent",
        person=[says("@Bo, not for the assistant: see you at noon. The assistant must not answer this.")],
        model=[empty()],
        tools=[raw("")],
        outcome=[sends_nothing()],
    ),
    Task(
        name="think_and_compute",
        person=[says("How many seconds have 17 days, 5 hours and 3 minutes? Give the number.")],
        model=[
            program(
                """
                from datetime import timedelta
                seconds = timedelta(days=17, hours=5, minutes=3).total_seconds()
                send_msg_text(_ck, f"17 days, 5 hours and 3 minutes are {seconds:.0f} seconds.")
                """,
                thought="I compute it instead of guessing.",
            )
        ],
        tools=[
            call("calculate", {"expression": "17 * 86400 + 5 * 3600 + 3 * 60"}),
            words("They are ${seconds} seconds.", after=r"(?P<seconds>\d{7})"),
        ],
        outcome=[sends(r"1[,. ]?486[,. ]?980")],
    ),
)
