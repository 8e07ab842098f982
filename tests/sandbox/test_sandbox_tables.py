"""Arrays and data frames among the variables that a program leaves."""

from __future__ import annotations

import pytest
from sandbox_lab import Lab

from broker_config.settings import SandboxSettings
from nekro.sandbox.models import StopType
from nekro.sandbox.packages.base import read_base

pytestmark = pytest.mark.skipif(
    read_base(SandboxSettings()) is None, reason="the base layer is not built (`make install`)"
)
MOST = 256 << 10
MAKES = """
import numpy as np, pandas as pd, datetime
grid = np.arange(6, dtype="int16").reshape(2, 3)[:, ::2]
flags, words, when = np.array([True]), np.array(["é", "bb"]), np.array(["2026-05-04"], dtype="M8[D]")
empty, number, real = np.empty((0, 3)), np.int64(7), np.float32(0.5)
frame = pd.DataFrame({"城市": ["北京", None], "n": [1, 2], "x": [1.5, None], "b": [True, False],
                      "k": pd.Categorical(["y", "x"], categories=["y", "x"]),
                      "t": pd.to_datetime(["2026-05-04", None])})
named = frame.set_index("n")
daily = pd.DataFrame({"v": [1.0, 2.0]}, index=pd.date_range("2026-05-04", periods=2).rename("day"))
mixed = pd.DataFrame({"o": pd.Series([1, "a", datetime.date(2026, 5, 4)], dtype=object)}, index=[3, 1, 2])
sums = frame["x"].rename("total")
wide = pd.DataFrame(np.zeros((2, 3)))
"""
SHOWS = """
def show():
    rows = []
    for name in "grid flags words when empty number real frame named daily mixed sums wide".split():
        value = globals()[name]
        rows += [name, type(value).__name__, str(getattr(value, "dtype", "")), repr(value)]
        if hasattr(value, "dtypes"):
            rows += [str(value.dtypes), repr(value.index)]
    return "\\n".join(rows)
print(show())
del show
"""


@pytest.mark.extended
async def test_arrays_and_data_frames_begin_the_next_program_as_they_were(box: Lab) -> None:
    first = await box.run(MAKES + SHOWS, keep_bytes=MOST)
    assert first.stop_type is StopType.NORMAL, first.output
    assert first.kept is not None
    assert first.kept.not_kept == ()
    second = await box.run(SHOWS, variables=first.kept.values, keep_bytes=MOST)
    assert second.output == first.output
    assert second.kept is not None and dict(second.kept.values) == dict(first.kept.values)


async def test_what_does_not_come_back_as_it_is_is_not_kept(box: Lab) -> None:
    code = """
import numpy as np, pandas as pd
objects = np.array([object()])
record = np.zeros(2, dtype=[("a", "i4")])
masked = np.ma.array([1, 2], mask=[0, 1])
levels = pd.DataFrame({"a": [1, 2], "b": [1, 2], "c": [3, 4]}).set_index(["a", "b"])
twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
zoned = pd.DataFrame({"a": pd.to_datetime(["2026-05-04"], utc=True)})
marked = pd.DataFrame({"a": [1]})
marked.attrs["k"] = 1
large = np.zeros(10_000_000)
fine = 1
"""
    result = await box.run(code, keep_bytes=MOST)
    assert result.kept is not None, result
    assert dict(result.kept.values) == {"fine": "1"}
    assert set(result.kept.not_kept) == {
        "objects", "record", "masked", "levels", "twice", "zoned", "marked", "large",
    }  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [
        '{"$tuple":["\\u0000array","O",[1],{"$bytes":"AAAAAAAAAAA="}]}',
        '{"$tuple":["\\u0000array","<f8",[1000000000],{"$bytes":"AAAAAAAAAAA="}]}',
        '{"$tuple":["\\u0000array"]}',
        '{"$tuple":["\\u0000frame",1,2,3]}',
        '{"$tuple":["\\u0000number",{"$bytes":""},[],1]}',
    ],
)
async def test_a_forged_form_costs_only_its_variable(box: Lab, form: str) -> None:
    result = await box.run("print('bad' in globals(), good)", variables={"bad": form, "good": "1"})
    assert result.stop_type is StopType.NORMAL
    assert "[bad was not kept: " in result.output and result.output.endswith("False 1\n")


async def test_values_of_a_data_frame_are_plain_arguments(box: Lab) -> None:
    """Models pass what they read out of a table to methods as it is."""
    code = """
import collections, datetime
import numpy as np, pandas as pd
frame = pd.DataFrame({"n": [1, 2], "x": [0.5, 1.5], "t": pd.to_datetime(["2026-05-04", "2026-05-05"])})
first = frame.iloc[0]
values = [frame["n"].sum(), np.float64(0.5), np.bool_(True), np.str_("a"), first["t"], frame["t"].diff()[1]]
counts = collections.Counter("aab")
lists = collections.defaultdict(list, {"k": [np.int8(3)]})
print(repr(echo(values)[0][0]))
print(repr(echo({"counts": counts, "lists": lists})[0][0]))
for value in (pd.NaT, np.array([1]), object()):
    try:
        echo(value)
    except TypeError as exc:
        print(str(exc)[:40])
"""
    result = await box.run(code, keep_bytes=MOST)
    assert result.stop_type is StopType.NORMAL, result.output
    assert result.output.split("\n")[:2] == [
        "[3, 0.5, True, 'a', datetime.datetime(2026, 5, 4, 0, 0), datetime.timedelta(days=1)]",
        "{'counts': {'a': 2, 'b': 1}, 'lists': {'k': [3]}}",
    ]
    assert result.output.count("an argument cannot be sent to a plugin") == 3
    # Kept variables stay what they are, or are not kept.
    assert result.kept is not None and {"values", "counts", "lists"} <= set(result.kept.not_kept)
