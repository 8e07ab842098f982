"""File names in `Content-Disposition` headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nekro_agent.files.names import plain_name, stated_name


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("attachment; filename*=UTF-8''%e2%82%ac%20rates.pdf", "€ rates.pdf"),
        ("attachment; filename=\"EURO.pdf\"; filename*=utf-8'en'%e2%82%ac.pdf", "€.pdf"),
        ("attachment; FileName*=iso-8859-1''caf%e9.txt", "café.txt"),
        ("attachment; filename*=bogus''x; filename=ok.txt", "ok.txt"),
        ("attachment; filename*=UTF-8''%ff; filename=ok.txt", "ok.txt"),
        ("attachment; filename*0*=UTF-8''%e2%82; filename*1*=%ac; filename*2=.pdf", "€.pdf"),
        (r'attachment; filename="a\"b;c.txt"', 'a"b;c.txt'),
        ('attachment; filename="=?UTF-8?B?5oql5ZGKLnBkZg==?="', "报告.pdf"),
        ('attachment; filename="=?UTF-8?Q?a=E2=82=AC.pdf?="', "a€.pdf"),
        ('attachment; filename="=?bogus?B?!!?="', "=_bogus_B_!!_=".replace("_", "?")),
        ('attachment; filename="报告.pdf"', "报告.pdf"),
        ("attachment; filename=plain name.txt; size=3", "plain name.txt"),
        ("attachment;filename=tight.txt", "tight.txt"),
        ('filename="untyped.txt"', "untyped.txt"),
        ('form-data; name="x; filename=evil"; filename="ok.txt"', "ok.txt"),
        ('attachment; filename="../../etc/passwd"', "passwd"),
        ("attachment; filename*=UTF-8''..%2f..%5cx.sh", "x.sh"),
        (r'attachment; filename="C:\temp\a.png"', "a.png"),
        ("attachment; filename=.env", "env"),
        ("attachment; filename=con.TXT", "_con.TXT"),
        ("attachment; filename=\"trailing. . \"", "trailing"),
        ("attachment; filename*=UTF-8''a%00%0ab.txt", "ab.txt"),
        ('attachment; filename=""', None),
        ('attachment; filename="..."', None),
        ("attachment; filename*=''", None),
        ("inline", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_stated_name_is_read_and_reduced_to_a_plain_one(header: str, name: str | None) -> None:
    assert plain_name(stated_name(header.encode())) == name


def test_latin_1_is_read_where_it_is_no_utf_8() -> None:
    assert stated_name(b'attachment; filename="caf\xe9.txt"') == "café.txt"


def test_a_long_name_keeps_its_suffix() -> None:
    name = plain_name(stated_name(b'attachment; filename="' + b"x" * 5000 + b'.pdf"'))
    assert name is not None and len(name) == 255 and name.endswith(".pdf")


@given(st.binary(max_size=300) | st.text(alphabet="filename*=\"';\\%0UTF-8?/", max_size=200).map(str.encode))
def test_no_header_is_an_error_or_a_path(header: bytes) -> None:
    name = plain_name(stated_name(b"attachment; " + header))
    assert name is None or (name not in ("", ".", "..") and not set(name) & set("/\\\0\n") and name[0] != ".")
