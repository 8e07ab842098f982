"""What programs read is repeated in the order in which they read it, up to the first note that is missing."""

from __future__ import annotations

from nekro.app.calls.journal import ProgramJournal, ReadingNotes
from nekro.sandbox.models import NOT_RESUMABLE


def journal_of(*notes: str) -> ProgramJournal:
    return ProgramJournal((), {str(number): note for number, note in enumerate(notes)})


def notes_of(*readings: str) -> list[str]:
    """The notes of calls with these readings, the first calls of their program."""
    read = ReadingNotes()
    found = []
    for text in readings:
        read.add(text)
        found.append(read.take())
    return found


def test_readings_are_repeated_in_order_whatever_the_order_of_the_notes() -> None:
    one, none, two, three = notes_of("t1", "", "m2,t3", "t4")
    assert none == ""
    assert journal_of(three, one, none, two).readings == "t1,m2,t3,t4"


def test_the_next_call_that_is_sent_takes_what_was_read_before_others() -> None:
    read = ReadingNotes()
    read.add("t1")  # of a call that does not fit its method
    read.add("t2")
    assert journal_of(read.take()).readings == "t1,t2"


def test_a_note_of_a_call_that_was_not_sent_is_taken_again() -> None:
    read = ReadingNotes()
    read.add("t1")
    lost = read.take()
    read.add("t2")
    meanwhile = read.take()
    read.put_back(lost)
    read.add("t3")
    assert journal_of(meanwhile, read.take()).readings == "t1,t2,t3"


def test_readings_after_a_lost_note_are_not_repeated() -> None:
    one, _lost, three = notes_of("t1", "t2", "t3")
    assert journal_of(one, three).readings == "t1"


def test_another_attempt_goes_on_after_the_readings_of_the_first() -> None:
    first = notes_of("t1", "t2")
    again = ReadingNotes(journal_of(*first).read)
    again.add("t3")
    assert journal_of(*first, again.take()).readings == "t1,t2,t3"
    assert len(again) == len("t1,t2,t3,")


def test_the_text_of_readings_is_the_program_s_and_is_not_read() -> None:
    strange = "7:t1,+-.:0,999999:m"
    assert journal_of(*notes_of(strange, "t2")).readings == f"{strange},t2"


def test_a_program_that_cannot_say_what_it_read_has_no_note_of_it() -> None:
    read = ReadingNotes()
    read.add(NOT_RESUMABLE)
    assert read.are_lost and read.take() == ""
